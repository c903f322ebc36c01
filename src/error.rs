//! The one error type: what the caller should do, what was being done, and what a person can try.
//!
//! Owns the kinds and how an error reads. Does not own exit codes (`cli/exit.rs`) or the classification of foreign
//! errors, which happens once, in the file of the backend that meets them.

use std::fmt;

/// What the caller does about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
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
    Encrypted,
    /// A fault of ours.
    Internal,
}

impl ErrorKind {
    /// All of them, in the order of their numbers.
    pub const ALL: [ErrorKind; 8] = [
        ErrorKind::Usage,
        ErrorKind::NotFound,
        ErrorKind::Fenced,
        ErrorKind::Unavailable,
        ErrorKind::Corrupt,
        ErrorKind::Conflict,
        ErrorKind::Encrypted,
        ErrorKind::Internal,
    ];

    /// As metrics have it.
    pub fn word(self) -> &'static str {
        match self {
            ErrorKind::Usage => "usage",
            ErrorKind::NotFound => "not_found",
            ErrorKind::Fenced => "fenced",
            ErrorKind::Unavailable => "unavailable",
            ErrorKind::Corrupt => "corrupt",
            ErrorKind::Conflict => "conflict",
            ErrorKind::Encrypted => "encrypted",
            ErrorKind::Internal => "internal",
        }
    }
}

/// An error with a verb phrase that says what was being done and, where there is one, a hint with a command.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    context: String,
    hint: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// The result of everything that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind`; `context` names the object and what happened to it.
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Self {
        Error {
            kind,
            context: context.into(),
            hint: None,
            source: None,
        }
    }

    /// The request is wrong.
    pub fn usage(context: impl Into<String>) -> Self {
        Error::new(ErrorKind::Usage, context)
    }

    /// What was named does not exist.
    pub fn not_found(context: impl Into<String>) -> Self {
        Error::new(ErrorKind::NotFound, context)
    }

    /// Stored bytes are not what they should be.
    pub fn corrupt(context: impl Into<String>) -> Self {
        Error::new(ErrorKind::Corrupt, context)
    }

    /// A server or disk did not do its part.
    pub fn unavailable(context: impl Into<String>) -> Self {
        Error::new(ErrorKind::Unavailable, context)
    }

    /// Local files disagree with what would be written.
    pub fn conflict(context: impl Into<String>) -> Self {
        Error::new(ErrorKind::Conflict, context)
    }

    /// A failed system call on `path`.
    pub fn io(context: impl Into<String>, cause: std::io::Error) -> Self {
        use std::io::ErrorKind as E;
        let hint = match cause.kind() {
            E::StorageFull | E::QuotaExceeded => Some(
                "free some space on that disk; what streams goes on by itself, any other command is to be run again",
            ),
            E::PermissionDenied => {
                Some("run sessiond as the user that owns the directory, or mend its permissions")
            }
            _ => None,
        };
        let error = Error::new(ErrorKind::Unavailable, context).caused_by(cause);
        match hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }

    /// A failed system call on a path that somebody named: one where nothing can be read or written is the wrong one.
    pub fn named(context: impl Into<String>, cause: std::io::Error) -> Self {
        use std::io::ErrorKind as E;
        let hint = match cause.kind() {
            E::NotFound => {
                "see that it is spelt right; a directory to write into must be there already"
            }
            // Where a directory is to be made, a file is AlreadyExists.
            E::NotADirectory | E::AlreadyExists => "a part of that path is a file: name another",
            E::IsADirectory => "name a file, not a directory",
            E::PermissionDenied => {
                "name one that sessiond may use, run it as the user that may, or mend the permissions"
            }
            E::ReadOnlyFilesystem => "name one on a disk that can be written",
            _ => return Error::io(context, cause),
        };
        Error::usage(context).caused_by(cause).hint(hint)
    }

    /// Says what a person can try; the innermost hint stays.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint.get_or_insert_with(|| hint.into());
        self
    }

    /// Attaches the cause.
    #[must_use]
    pub fn caused_by(mut self, cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(cause.into());
        self
    }

    /// Says what was being done when this happened; read from the outside in, the phrases make one line.
    #[must_use]
    pub fn context(mut self, phrase: impl fmt::Display) -> Self {
        self.context = format!("{phrase}: {}", self.context);
        self
    }

    /// What the caller does about it.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Whether the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        self.kind == ErrorKind::Unavailable
    }

    /// What a person can try.
    pub fn hint_text(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.context)?;
        let mut cause: Option<&(dyn std::error::Error + 'static)> = match &self.source {
            Some(source) => Some(source.as_ref()),
            None => None,
        };
        let mut said = self.context.clone();
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
pub trait ErrorContext<T> {
    /// Puts `phrase` in front of the error.
    fn context(self, phrase: impl fmt::Display) -> Result<T>;
    /// The same for a phrase that costs something to make.
    fn with_context<D: fmt::Display>(self, phrase: impl FnOnce() -> D) -> Result<T>;
}

impl<T> ErrorContext<T> for Result<T> {
    fn context(self, phrase: impl fmt::Display) -> Result<T> {
        self.map_err(|error| error.context(phrase))
    }

    fn with_context<D: fmt::Display>(self, phrase: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|error| error.context(phrase()))
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
            .caused_by(cause)
            .context("restore session 3f2a");
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
