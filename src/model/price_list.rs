//! The built-in list of prices: what the providers charge for known models, on one date.
//!
//! Owns the list and how a model finds its price. Does not own prices that users set (`prices`).
//! The list holds exact names: a model that is not in it has no price, rather than a wrong one.

/// The date on which the prices were collected from the price lists of Anthropic, OpenAI and Google.
pub const LIST_DATE: &str = "2026-11-18";

/// US dollars per million tokens: input, output, cache read, cache write.
pub type ListPrice = [f64; 4];

/// Old names and current names of the models with these prices. The cache-write price of Anthropic
/// is that of the five-minute cache. Where the price depends on the length of the prompt, it is that
/// of the shortest prompts.
const LIST: [(ListPrice, &[&str]); 33] = [
    (
        [15.0, 75.0, 1.5, 18.75],
        &[
            "claude-3-opus",
            "claude-opus-4",
            "claude-opus-4-0",
            "claude-opus-4-1",
        ],
    ),
    (
        [5.0, 25.0, 0.5, 6.25],
        &[
            "claude-opus-4-5",
            "claude-opus-4-6",
            "claude-opus-4-7",
            "claude-opus-4-8",
            "claude-opus-5",
        ],
    ),
    ([4.0, 20.0, 0.2, 5.0], &["claude-opus-5-5"]),
    (
        [3.0, 15.0, 0.3, 3.75],
        &[
            "claude-3-sonnet",
            "claude-3-5-sonnet",
            "claude-3-7-sonnet",
            "claude-sonnet-4",
            "claude-sonnet-4-0",
            "claude-sonnet-4-5",
            "claude-sonnet-4-6",
        ],
    ),
    ([2.0, 10.0, 0.2, 2.5], &["claude-sonnet-5"]),
    ([2.0, 10.0, 0.1, 2.5], &["claude-sonnet-5-5"]),
    ([0.25, 1.25, 0.03, 0.3], &["claude-3-haiku"]),
    ([0.8, 4.0, 0.08, 1.0], &["claude-3-5-haiku"]),
    ([1.0, 5.0, 0.1, 1.25], &["claude-haiku-4-5"]),
    ([0.1, 0.5, 0.01, 0.125], &["claude-haiku-5-5"]),
    (
        [10.0, 50.0, 1.0, 12.5],
        &["claude-fable-5", "claude-mythos-5"],
    ),
    (
        [10.0, 50.0, 0.25, 12.5],
        &["claude-fable-5-1", "claude-mythos-5-1"],
    ),
    (
        [1.25, 10.0, 0.125, 1.25],
        &[
            "gpt-5",
            "gpt-5-codex",
            "gpt-5.1",
            "gpt-5.1-codex",
            "gpt-5.1-codex-max",
        ],
    ),
    (
        [0.25, 2.0, 0.025, 0.25],
        &["gpt-5-mini", "gpt-5-codex-mini", "gpt-5.1-codex-mini"],
    ),
    ([0.05, 0.4, 0.005, 0.05], &["gpt-5-nano"]),
    ([15.0, 120.0, 15.0, 15.0], &["gpt-5-pro"]),
    (
        [1.75, 14.0, 0.175, 1.75],
        &["gpt-5.2", "gpt-5.2-codex", "gpt-5.3", "gpt-5.3-codex"],
    ),
    ([21.0, 168.0, 21.0, 21.0], &["gpt-5.2-pro"]),
    ([2.5, 15.0, 0.25, 2.5], &["gpt-5.4", "gpt-5.6-terra"]),
    ([0.75, 4.5, 0.075, 0.75], &["gpt-5.4-mini"]),
    ([5.0, 30.0, 0.5, 5.0], &["gpt-5.5", "gpt-5.6-sol"]),
    ([1.0, 6.0, 0.1, 1.0], &["gpt-5.6-luna"]),
    ([1.5, 6.0, 0.375, 1.5], &["codex-mini"]),
    ([2.0, 8.0, 0.5, 2.0], &["gpt-4.1", "o3"]),
    ([1.1, 4.4, 0.275, 1.1], &["o4-mini"]),
    ([1.25, 10.0, 0.125, 1.25], &["gemini-2.5-pro"]),
    ([0.3, 2.5, 0.03, 0.3], &["gemini-2.5-flash"]),
    ([0.1, 0.4, 0.01, 0.1], &["gemini-2.5-flash-lite"]),
    ([0.1, 0.4, 0.025, 0.1], &["gemini-2.0-flash"]),
    ([0.075, 0.3, 0.075, 0.075], &["gemini-2.0-flash-lite"]),
    ([2.0, 12.0, 0.2, 2.0], &["gemini-3-pro", "gemini-3.1-pro"]),
    ([0.5, 3.0, 0.05, 0.5], &["gemini-3-flash"]),
    // Messages that Claude Code itself writes as responses.
    ([0.0, 0.0, 0.0, 0.0], &["<synthetic>"]),
];

/// Number of models in the list.
pub fn len() -> usize {
    LIST.iter().map(|(_, names)| names.len()).sum()
}

/// The price of a model; none if it is not in the list.
pub fn price(model: &str) -> Option<ListPrice> {
    let model = plain_name(model);
    let (price, _) = LIST
        .iter()
        .find(|(_, names)| names.iter().any(|name| is_release(&model, name)))?;
    Some(*price)
}

/// The name without the provider, such as `us.anthropic.` or `openrouter/anthropic/`, and with the
/// separators that Anthropic uses.
fn plain_name(model: &str) -> String {
    let name = model.rsplit('/').next().unwrap_or(model);
    match name.find("claude-") {
        Some(start) => name[start..].replace('.', "-"),
        None => name.to_owned(),
    }
}

/// Whether `model` is the model `name`, or a dated release or preview of it.
fn is_release(model: &str, name: &str) -> bool {
    let Some(rest) = model.strip_prefix(name) else {
        return false;
    };
    // A context window, such as [1m], is not part of the name.
    rest.is_empty()
        || [
            "-20",
            "-v1",
            "-v2",
            "@",
            "[",
            "-latest",
            "-preview",
            "-thinking",
        ]
        .iter()
        .any(|release| rest.starts_with(release))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_found_by_every_name_that_providers_give_it() {
        let sonnet = Some([3.0, 15.0, 0.3, 3.75]);
        for model in [
            "claude-sonnet-4-5",
            "claude-sonnet-4-5-20250929",
            "claude-sonnet-4-5[1m]",
            "claude-sonnet-4-5@20250929",
            "us.anthropic.claude-sonnet-4-5-20250929-v1:0",
            "anthropic/claude-sonnet-4.5",
            "claude-3-7-sonnet-20250219",
        ] {
            assert_eq!(price(model), sonnet, "{model}");
        }
        assert_eq!(
            price("claude-opus-4-1-20250805"),
            price("claude-3-opus-20240229")
        );
        assert_eq!(price("gpt-5.3-codex"), price("gpt-5.2"));
        assert_eq!(price("gemini-3-pro-preview"), Some([2.0, 12.0, 0.2, 2.0]));
    }

    #[test]
    fn an_unknown_variant_has_no_price() {
        for model in [
            "claude-opus-4-9",
            "claude-opus-5-6",
            "gpt-5-turbo",
            "gpt-6",
            "opus",
            "",
        ] {
            assert_eq!(price(model), None, "{model}");
        }
    }

    #[test]
    fn every_name_has_one_price() {
        let mut names: Vec<&str> = LIST.iter().flat_map(|(_, names)| *names).copied().collect();
        let count = names.len();
        assert_eq!(count, len());
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
