//! The error type of the crate: what the caller should do, what failed and why, and what to try.
//!
//! Owns the error kinds and how an error reads. Does not own exit codes (`cli/exit.rs`), nor the
//! classification of foreign errors, which happens once, in the file of the back end that meets
//! them.
//!
//! # How an error reads
//!
//! An error prints as one line. There are two ways to make one:
//!
//! - **A statement** says what is wrong in a complete clause: [`Error::new`] and its short forms
//!   [`Error::usage`], [`Error::not_found`], [`Error::corrupt`], [`Error::unavailable`],
//!   [`Error::conflict`].
//! - **A verb phrase** says what sessiond was doing when something else failed: [`Error::io`],
//!   [`Error::user_path`], [`Error::caused_by`], and every `.context(…)` on the way up.
//!
//! `Display` puts "cannot " before the outermost verb phrase, once; the inner phrases stay bare.
//! The statement or the foreign cause comes last.
//!
//! ```text
//! Error::usage("invalid label \"x\": expected NAME=VALUE")
//!     invalid label "x": expected NAME=VALUE
//! Error::not_found("session 3f2a does not exist")
//!     session 3f2a does not exist
//! Error::corrupt("its header is incomplete").context("read log/17")
//!     cannot read log/17: its header is incomplete
//! Error::unavailable("get log/17").caused_by(refused)
//!     cannot get log/17: connection refused
//! Error::io("write a.jsonl", full)
//!     cannot write a.jsonl: no space left on device
//! Error::io("write a.jsonl", full).context("restore session 3f2a")
//!     cannot restore session 3f2a: write a.jsonl: no space left on device
//! ```
//!
//! A phrase never begins with "cannot": it is added here. A hint is one imperative sentence, with a
//! command that can be run as it is printed.

use std::fmt;

/// What the caller does about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The request is invalid; repeating it gives the same result.
    Usage,
    /// The named object does not exist.
    NotFound,
    /// Another writer owns the session; this one must stop writing to its log.
    Fenced,
    /// A server or disk failed; the only kind that is retried.
    Unavailable,
    /// Stored bytes are damaged.
    Corrupt,
    /// Local files differ from what would be written.
    Conflict,
    /// The object is encrypted, and no configured identity can decrypt it.
    Encrypted,
    /// A newer sessiond wrote the object. It is not damaged: nothing may delete or repair it.
    NewerFormat,
    /// A bug in sessiond.
    Internal,
}

impl ErrorKind {
    /// All kinds, in declaration order.
    pub const ALL: [ErrorKind; 9] = [
        ErrorKind::Usage,
        ErrorKind::NotFound,
        ErrorKind::Fenced,
        ErrorKind::Unavailable,
        ErrorKind::Corrupt,
        ErrorKind::Conflict,
        ErrorKind::Encrypted,
        ErrorKind::NewerFormat,
        ErrorKind::Internal,
    ];

    /// The name in metrics and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            ErrorKind::Usage => "usage",
            ErrorKind::NotFound => "not_found",
            ErrorKind::Fenced => "fenced",
            ErrorKind::Unavailable => "unavailable",
            ErrorKind::Corrupt => "corrupt",
            ErrorKind::Conflict => "conflict",
            ErrorKind::Encrypted => "encrypted",
            ErrorKind::NewerFormat => "newer_format",
            ErrorKind::Internal => "internal",
        }
    }

    /// Whether the object is undamaged but unreadable for this process: encrypted to others, or
    /// written by a newer sessiond. Such an object is neither skipped, repaired nor deleted.
    pub fn is_unreadable(self) -> bool {
        matches!(self, ErrorKind::Encrypted | ErrorKind::NewerFormat)
    }
}

/// An error: its kind, what failed, why, and a hint where there is one.
#[derive(Debug)]
pub struct Error(Box<Details>);

/// The content of an error. It is boxed, so that a `Result` stays small.
#[derive(Debug)]
struct Details {
    kind: ErrorKind,
    /// Verb phrases, outermost first.
    phrases: Vec<String>,
    /// The complete clause that the error began with, if it did.
    statement: Option<String>,
    hint: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// The result type of the crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind`. `statement` is a complete clause; a verb phrase if `caused_by` follows.
    pub fn new(kind: ErrorKind, statement: impl Into<String>) -> Self {
        Error(Box::new(Details {
            kind,
            phrases: Vec::new(),
            statement: Some(statement.into()),
            hint: None,
            source: None,
        }))
    }

    /// The request is invalid.
    pub fn usage(statement: impl Into<String>) -> Self {
        Error::new(ErrorKind::Usage, statement)
    }

    /// The named object does not exist.
    pub fn not_found(statement: impl Into<String>) -> Self {
        Error::new(ErrorKind::NotFound, statement)
    }

    /// Stored bytes are damaged.
    pub fn corrupt(statement: impl Into<String>) -> Self {
        Error::new(ErrorKind::Corrupt, statement)
    }

    /// A server or disk failed.
    pub fn unavailable(statement: impl Into<String>) -> Self {
        Error::new(ErrorKind::Unavailable, statement)
    }

    /// Local files differ from what would be written.
    pub fn conflict(statement: impl Into<String>) -> Self {
        Error::new(ErrorKind::Conflict, statement)
    }

    /// The object `name` has a format version that only a newer sessiond reads.
    pub fn newer_format(name: impl fmt::Display, version: u32, newest: u32) -> Self {
        Error::new(
            ErrorKind::NewerFormat,
            format!(
                "{name} has format version {version}; this sessiond reads up to version {newest}"
            ),
        )
        .hint("upgrade sessiond")
    }

    /// A failed system call; `phrase` names the operation and the path.
    pub fn io(phrase: impl Into<String>, cause: std::io::Error) -> Self {
        use std::io::ErrorKind as E;
        let hint = match cause.kind() {
            E::StorageFull | E::QuotaExceeded => Some(
                "free some disk space, then run the command again; a running daemon resumes automatically",
            ),
            E::PermissionDenied => {
                Some("run sessiond as the owner of the directory, or change its permissions")
            }
            _ => None,
        };
        let error = Error::new(ErrorKind::Unavailable, phrase).caused_by(cause);
        match hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }

    /// A failed system call on a path that the user gave: an unusable path is a usage error.
    pub fn user_path(phrase: impl Into<String>, cause: std::io::Error) -> Self {
        use std::io::ErrorKind as E;
        let hint = match cause.kind() {
            E::NotFound => "create the directory first, or choose another path",
            // Creating a directory where a file exists is AlreadyExists.
            E::NotADirectory | E::AlreadyExists => {
                "choose another path: this path or a parent of it is a file"
            }
            E::IsADirectory => "specify a file, not a directory",
            E::PermissionDenied => {
                "choose a path that sessiond can access, or change the permissions of this path"
            }
            E::ReadOnlyFilesystem => "choose a path on a writable file system",
            _ => return Error::io(phrase, cause),
        };
        Error::usage(phrase).caused_by(cause).hint(hint)
    }

    /// A failed read of a file that the user named.
    pub fn unreadable_file(phrase: impl Into<String>, cause: std::io::Error) -> Self {
        match cause.kind() {
            std::io::ErrorKind::NotFound => Error::usage(phrase)
                .caused_by(cause)
                .hint("check the path of the file"),
            _ => Error::user_path(phrase, cause),
        }
    }

    /// Adds a hint, unless the error has one: the innermost hint stays.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint.get_or_insert_with(|| hint.into());
        self
    }

    /// Attaches the cause. The text that the error was made with becomes a verb phrase.
    #[must_use]
    pub fn caused_by(mut self, cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        let statement = self.0.statement.take();
        self.0.phrases.extend(statement.map(bare));
        self.0.source = Some(cause.into());
        self
    }

    /// Adds the operation that failed, as a verb phrase, in front of the others.
    #[must_use]
    pub fn context(mut self, phrase: impl fmt::Display) -> Self {
        self.0.phrases.insert(0, bare(phrase.to_string()));
        self
    }

    /// What the caller does about it.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        self.0.kind == ErrorKind::Unavailable
    }

    /// The hint, if there is one.
    pub fn hint_text(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// The line without "cannot ": the phrases, then the statement or the causes.
    fn chain(&self) -> String {
        let mut line = self.0.phrases.join(": ");
        let mut add = |text: &str| {
            // Foreign errors often repeat their cause; print it once.
            if line.is_empty() {
                line.push_str(text);
            } else if !line.contains(text) {
                line.push_str(": ");
                line.push_str(text);
            }
        };
        if let Some(statement) = &self.0.statement {
            match self.0.phrases.is_empty() {
                true => add(statement),
                false => add(&bare(statement.clone())),
            }
        }
        let mut cause = self
            .0
            .source
            .as_deref()
            .map(|source| source as &(dyn std::error::Error + 'static));
        while let Some(error) = cause {
            match error.downcast_ref::<Error>() {
                Some(error) => add(&error.chain()),
                None => add(&error.to_string()),
            }
            cause = error.source();
        }
        line
    }
}

/// A verb phrase without a leading "cannot ", which `Display` adds.
fn bare(phrase: String) -> String {
    match phrase.strip_prefix("cannot ") {
        Some(rest) => rest.to_owned(),
        None => phrase,
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.0.phrases.is_empty() {
            f.write_str("cannot ")?;
        }
        f.write_str(&self.chain())
    }
}

impl std::error::Error for Error {}

/// A URL for display: without the user and password before an `@`.
pub fn redact_url(url: &str) -> String {
    let shown = match (url.split_once(':'), url.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, rest))) => format!("{scheme}://…@{rest}"),
        _ => url.to_owned(),
    };
    // PostgreSQL also accepts a password as a parameter.
    let Some((address, parameters)) = shown.split_once('?') else {
        return shown;
    };
    let hide = |parameter: &str| match parameter.split_once('=') {
        Some((name, _)) if name.to_ascii_lowercase().contains("password") => format!("{name}=…"),
        _ => parameter.to_owned(),
    };
    let parameters: Vec<String> = parameters.split('&').map(hide).collect();
    format!("{address}?{}", parameters.join("&"))
}

/// Adds a verb phrase to the error of a result.
pub trait ErrorContext<T> {
    /// Adds `phrase`, the operation that failed.
    fn context(self, phrase: impl fmt::Display) -> Result<T>;
    /// Adds a phrase that is built only on failure.
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

    fn refused() -> std::io::Error {
        std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "connection refused")
    }

    #[test]
    fn a_chain_reads_as_one_line_with_one_cannot() {
        let error = Error::unavailable("get log/000000000017").caused_by(refused());
        assert_eq!(
            error.to_string(),
            "cannot get log/000000000017: connection refused"
        );
        let error = error.context("restore session 3f2a");
        assert_eq!(
            error.to_string(),
            "cannot restore session 3f2a: get log/000000000017: connection refused"
        );
        assert!(error.is_retryable());
    }

    #[test]
    fn a_statement_stands_alone_and_ends_a_chain() {
        let invalid = || Error::usage("invalid label \"x\": expected NAME=VALUE");
        assert_eq!(
            invalid().to_string(),
            "invalid label \"x\": expected NAME=VALUE"
        );
        assert_eq!(
            invalid().context("label session 3f2a").to_string(),
            "cannot label session 3f2a: invalid label \"x\": expected NAME=VALUE"
        );
    }

    #[test]
    fn cannot_is_printed_once_even_where_a_phrase_has_it() {
        let remote = Error::unavailable("cannot get log/17: connection refused");
        assert_eq!(remote.to_string(), "cannot get log/17: connection refused");
        assert_eq!(
            remote.context("cannot flush session 3f2a").to_string(),
            "cannot flush session 3f2a: get log/17: connection refused"
        );
        let inner = Error::unavailable("get log/17").caused_by(refused());
        assert_eq!(
            Error::usage("read the key").caused_by(inner).to_string(),
            "cannot read the key: get log/17: connection refused"
        );
    }

    #[test]
    fn a_newer_format_is_not_damage() {
        let error = Error::newer_format("entry 4 of session 3f2a", 2, 1);
        assert_eq!(
            error.to_string(),
            "entry 4 of session 3f2a has format version 2; this sessiond reads up to version 1"
        );
        assert_eq!(error.hint_text(), Some("upgrade sessiond"));
        assert!(error.kind().is_unreadable() && !error.is_retryable());
    }

    #[test]
    fn a_url_is_shown_without_its_password() {
        assert_eq!(redact_url("https://u:secret@host/x"), "https://…@host/x");
        assert_eq!(redact_url("ftp:/u:se@cret@host"), "ftp://…@host");
        assert_eq!(redact_url("file:///a/b"), "file:///a/b");
    }

    #[test]
    fn the_innermost_hint_stays() {
        let error = Error::usage("a").hint("first").hint("second");
        assert_eq!(error.hint_text(), Some("first"));
    }
}
