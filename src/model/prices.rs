//! The `[prices]` table of the configuration file: the price of tokens, by model.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::model::Tokens;

/// Prices by model name or prefix of it.
#[derive(Debug, Clone, Default, Deserialize, PartialEq)]
#[serde(transparent)]
pub struct Prices(BTreeMap<String, Price>);

/// US dollars per million tokens, which equals millionths of a dollar per token.
#[derive(Debug, Clone, Copy, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Price {
    input: f64,
    output: f64,
    #[serde(default)]
    cache_read: f64,
    #[serde(default)]
    cache_write: f64,
}

impl Prices {
    /// The cost of a response in millionths of a US dollar; none if the model has no price. The
    /// longest name that is a prefix of the model's name applies.
    pub fn cost(&self, model: &str, tokens: Tokens) -> Option<u64> {
        let price = self
            .0
            .iter()
            .filter(|(name, _)| model.starts_with(name.as_str()))
            .max_by_key(|(name, _)| name.len())?
            .1;
        let cost_of = |count: u64, price: f64| count as f64 * price;
        let cost = cost_of(tokens.input, price.input)
            + cost_of(tokens.output, price.output)
            + cost_of(tokens.cache_read, price.cache_read)
            + cost_of(tokens.cache_write, price.cache_write);
        Some(cost.round() as u64)
    }
}
