//! The token that clients of the session store send. It is read from a file, because arguments and
//! variables are visible to other processes.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::{Error, Result};
use crate::model::Digest;

/// Minimum length of a token. A random token of this length cannot be guessed.
const MIN_LEN: usize = 16;

/// Maximum length of a token.
const MAX_LEN: usize = 1024;

/// A token. Only its digest is kept.
#[derive(Clone)]
pub struct Token {
    digest: Digest,
}

impl Token {
    /// Reads the token from a file, without the newline at its end.
    pub fn read(path: &Path) -> Result<Token> {
        let mut bytes = Vec::new();
        File::open(path)
            .and_then(|file| file.take(MAX_LEN as u64 + 2).read_to_end(&mut bytes))
            .map_err(|cause| {
                Error::user_path(format!("read the token in {}", path.display()), cause)
            })?;
        let token = bytes.trim_ascii();
        let is_valid = (MIN_LEN..=MAX_LEN).contains(&token.len())
            && token.iter().all(|byte| byte.is_ascii_graphic());
        if !is_valid {
            return Err(Error::usage(format!(
                "invalid --token-file value {:?}: the file must contain {MIN_LEN} to {MAX_LEN} \
                 printable ASCII characters without spaces",
                path.display()
            ))
            .hint(format!(
                "run \"openssl rand -hex 32 > {}\" to create a token",
                path.display()
            )));
        }
        Ok(Token {
            digest: Digest::of(token),
        })
    }

    /// Whether an `Authorization` header contains the token. The comparison takes the same time
    /// wherever the two differ: it compares digests, whose bytes a client cannot choose, and does
    /// not stop at the first difference.
    pub fn is_in(&self, authorization: Option<&[u8]>) -> bool {
        let Some((scheme, given)) = authorization.and_then(|header| header.split_at_checked(7))
        else {
            return false;
        };
        let given = Digest::of(given.trim_ascii());
        let pairs = self.digest.as_bytes().iter().zip(given.as_bytes());
        let difference = pairs.fold(0, |difference, (one, other)| difference | (one ^ other));
        scheme.eq_ignore_ascii_case(b"bearer ") && difference == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_itself_is_accepted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        let token = Token::read(&path).unwrap();
        assert!(token.is_in(Some(b"Bearer 0123456789abcdef")));
        assert!(token.is_in(Some(b"bearer  0123456789abcdef")));
        for wrong in [
            "Bearer 0123456789abcdeg",
            "Bearer 0123456789abcde",
            "Bearer 0123456789abcdef0",
            "Basic 0123456789abcdef",
            "0123456789abcdef",
            "Bearer ",
            "",
        ] {
            assert!(!token.is_in(Some(wrong.as_bytes())), "{wrong}");
        }
        assert!(!token.is_in(None));
    }

    #[test]
    fn a_short_or_unprintable_token_is_rejected() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        for bad in ["", "short", "with a space in the middle", &"x".repeat(2000)] {
            std::fs::write(&path, bad).unwrap();
            assert!(Token::read(&path).is_err(), "{bad}");
        }
        assert!(Token::read(&directory.path().join("missing")).is_err());
    }
}
