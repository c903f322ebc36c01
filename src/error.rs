//! The one error type: what the caller should do, what was being done, and what a person can try.
//!
//! Owns the kinds and how an error reads. Does not own exit codes (`cli/exit.rs`) or the classification of foreign
//! errors, which happens once, in the file of the backend that meets them.

use std::fmt;

/// What the caller does about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The request itself is wrong; asking again gives the same answer.
    Usage,
    /// What was named does not exist.
    NotFound,
    /// Another writer holds the session; this one must stop writing to its log.
    Fenced,
    /// A server or disk did not do its part; the only kind that is tried again.
    Unavailable,
    /// Stored bytes are not what they should be.
    Corrupt,
    /// Local files disagree with what would be written.
    Conflict,
    /// It is encrypted, and not to any identity at hand.
    Sealed,
    /// A fault of ours.
    Internal,
}

impl Kind {
    /// All of them, in the order of their numbers.
    pub const ALL: [Kind; 8] = [
        Kind::Usage,
        Kind::NotFound,
        Kind::Fenced,
        Kind::Unavailable,
        Kind::Corrupt,
        Kind::Conflict,
        Kind::Sealed,
        Kind::Internal,
    ];

    /// As metrics have it.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Usage => "usage",
            Kind::NotFound => "not_found",
            Kind::Fenced => "fenced",
            Kind::Unavailable => "unavailable",
            Kind::Corrupt => "corrupt",
            Kind::Conflict => "conflict",
            Kind::Sealed => "sealed",
            Kind::Internal => "internal",
        }
    }
}

/// An error with a verb phrase that says what was being done and, where there is one, a hint with a command.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    doing: String,
    hint: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// The result of everything that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind`; `doing` names the object and what happened to it.
    pub fn new(kind: Kind, doing: impl Into<String>) -> Self {
        Error {
            kind,
            doing: doing.into(),
            hint: None,
            source: None,
        }
    }

    /// The request is wrong.
    pub fn usage(doing: impl Into<String>) -> Self {
        Error::new(Kind::Usage, doing)
    }

    /// What was named does not exist.
    pub fn not_found(doing: impl Into<String>) -> Self {
        Error::new(Kind::NotFound, doing)
    }

    /// Stored bytes are not what they should be.
    pub fn corrupt(doing: impl Into<String>) -> Self {
        Error::new(Kind::Corrupt, doing)
    }

    /// A server or disk did not do its part.
    pub fn unavailable(doing: impl Into<String>) -> Self {
        Error::new(Kind::Unavailable, doing)
    }

    /// Local files disagree with what would be written.
    pub fn conflict(doing: impl Into<String>) -> Self {
        Error::new(Kind::Conflict, doing)
    }

    /// A failed system call on `path`.
    pub fn io(doing: impl Into<String>, cause: std::io::Error) -> Self {
        use std::io::ErrorKind as E;
        let hint = match cause.kind() {
            E::StorageFull | E::QuotaExceeded => Some(
                "free some space on that disk; what streams goes on by itself, any other command is to be run again",
            ),
            E::PermissionDenied => {
                Some("run sessiond as the user that owns the folder, or mend its permissions")
            }
            _ => None,
        };
        let error = Error::new(Kind::Unavailable, doing).because(cause);
        match hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }

    /// A failed system call on a path that somebody named: one where nothing can be read or written is the wrong one.
    pub fn named(doing: impl Into<String>, cause: std::io::Error) -> Self {
        use std::io::ErrorKind as E;
        let hint = match cause.kind() {
            E::NotFound => {
                "see that it is spelt right; a folder to write into must be there already"
            }
            // Where a folder is to be made, a file is AlreadyExists.
            E::NotADirectory | E::AlreadyExists => "a part of that path is a file: name another",
            E::IsADirectory => "name a file, not a folder",
            E::PermissionDenied => {
                "name one that sessiond may use, run it as the user that may, or mend the permissions"
            }
            E::ReadOnlyFilesystem => "name one on a disk that can be written",
            _ => return Error::io(doing, cause),
        };
        Error::usage(doing).because(cause).hint(hint)
    }

    /// Says what a person can try; the innermost hint stays.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint.get_or_insert_with(|| hint.into());
        self
    }

    /// Attaches the cause.
    #[must_use]
    pub fn because(mut self, cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(cause.into());
        self
    }

    /// Says what was being done when this happened; read from the outside in, the phrases make one line.
    #[must_use]
    pub fn doing(mut self, phrase: impl fmt::Display) -> Self {
        self.doing = format!("{phrase}: {}", self.doing);
        self
    }

    /// What the caller does about it.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        self.kind == Kind::Unavailable
    }

    /// What a person can try.
    pub fn hint_text(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.doing)?;
        let mut cause: Option<&(dyn std::error::Error + 'static)> = match &self.source {
            Some(source) => Some(source.as_ref()),
            None => None,
        };
        let mut said = self.doing.clone();
        while let Some(error) = cause {
            let text = error.to_string();
            // Wrappers of foreign libraries like to repeat their cause; once is enough.
            if !said.contains(&text) {
                write!(f, ": {text}")?;
                said.push_str(&text);
            }
            cause = error.source();
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

/// A URL as a person may see it: without the user and password before an `@`.
pub fn without_secret(url: &str) -> String {
    match (url.split_once(':'), url.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, place))) => format!("{scheme}://…@{place}"),
        _ => url.to_owned(),
    }
}

/// Adds what was being done to the error of a result.
pub trait Doing<T> {
    /// Puts `phrase` in front of the error.
    fn doing(self, phrase: impl fmt::Display) -> Result<T>;
    /// The same for a phrase that costs something to make.
    fn doing_with<D: fmt::Display>(self, phrase: impl FnOnce() -> D) -> Result<T>;
}

impl<T> Doing<T> for Result<T> {
    fn doing(self, phrase: impl fmt::Display) -> Result<T> {
        self.map_err(|error| error.doing(phrase))
    }

    fn doing_with<D: fmt::Display>(self, phrase: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|error| error.doing(phrase()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_reads_as_one_line() {
        let cause =
            std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "connection refused");
        let error = Error::unavailable("get log/000000000017")
            .because(cause)
            .doing("restore session 3f2a");
        assert_eq!(
            error.to_string(),
            "restore session 3f2a: get log/000000000017: connection refused"
        );
        assert!(error.is_retryable());
    }

    #[test]
    fn a_url_is_shown_without_its_password() {
        assert_eq!(
            without_secret("https://u:secret@host/x"),
            "https://…@host/x"
        );
        assert_eq!(without_secret("ftp:/u:se@cret@host"), "ftp://…@host");
        assert_eq!(without_secret("file:///a/b"), "file:///a/b");
    }

    #[test]
    fn the_innermost_hint_stays() {
        let error = Error::usage("a").hint("first").hint("second");
        assert_eq!(error.hint_text(), Some("first"));
    }
}
