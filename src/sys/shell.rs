//! Words of a shell command.

/// Quotes a word for `sh`.
pub(crate) fn quote(word: &str) -> String {
    let is_safe = |letter: char| letter.is_ascii_alphanumeric() || "/._-+:=@%,".contains(letter);
    if !word.is_empty() && word.chars().all(is_safe) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_sh() {
        assert_eq!(quote("/usr/bin/sessiond"), "/usr/bin/sessiond");
        assert_eq!(quote("/it's here/sessiond"), r"'/it'\''s here/sessiond'");
        assert_eq!(quote(""), "''");
    }
}
