//! Prices of tokens: the `[prices]` table of the configuration file, and the built-in list for
//! models that the table does not have.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::price_list;
use crate::model::Tokens;

/// Prices by model name or prefix of it.
#[derive(Debug, Clone, Default, Deserialize, PartialEq)]
#[serde(from = "BTreeMap<String, Price>")]
pub struct Prices {
    table: BTreeMap<String, Price>,
    uses_list: bool,
}

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

impl From<BTreeMap<String, Price>> for Prices {
    fn from(table: BTreeMap<String, Price>) -> Prices {
        Prices {
            table,
            uses_list: false,
        }
    }
}

impl Prices {
    /// These prices, and those of the built-in list for all other models.
    #[must_use]
    pub fn with_list(self) -> Prices {
        Prices {
            uses_list: true,
            ..self
        }
    }

    /// The cost of a response in millionths of a US dollar; none if the model has no price. The
    /// longest name of the table that is a prefix of the model's name applies, then the list.
    pub fn cost(&self, model: &str, tokens: Tokens) -> Option<u64> {
        let set = self
            .table
            .iter()
            .filter(|(name, _)| model.starts_with(name.as_str()))
            .max_by_key(|(name, _)| name.len())
            .map(|(_, price)| *price);
        let listed = || {
            let [input, output, cache_read, cache_write] = price_list::price(model)?;
            Some(Price {
                input,
                output,
                cache_read,
                cache_write,
            })
        };
        let price = set.or_else(|| listed().filter(|_| self.uses_list))?;
        let cost_of = |count: u64, price: f64| count as f64 * price;
        let cost = cost_of(tokens.input, price.input)
            + cost_of(tokens.output, price.output)
            + cost_of(tokens.cache_read, price.cache_read)
            + cost_of(tokens.cache_write, price.cache_write);
        Some(cost.round() as u64)
    }

    /// Where the prices come from, for `config show`.
    pub fn source(&self) -> String {
        let list = format!(
            "built-in list of {} ({} models)",
            price_list::LIST_DATE,
            price_list::len()
        );
        match self.table.len() {
            0 => list,
            count => format!("{list}, overridden by {count} in the file"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_overrides_the_list() {
        let tokens = Tokens {
            input: 1_000_000,
            ..Tokens::default()
        };
        let table: Prices =
            toml::from_str("claude-opus-4-5 = { input = 1.0, output = 2.0 }").unwrap();
        assert_eq!(table.cost("claude-opus-4-6", tokens), None);
        let prices = table.with_list();
        assert_eq!(
            prices.cost("claude-opus-4-5-20251101", tokens),
            Some(1_000_000)
        );
        assert_eq!(prices.cost("claude-opus-4-6", tokens), Some(5_000_000));
        assert_eq!(prices.cost("my-model", tokens), None);
        assert!(prices.source().ends_with("overridden by 1 in the file"));
    }
}
