//! Mutations: deliberate bugs, to prove that the simulation detects them.
//!
//! Owns the list of mutations. Each one is checked at one place of the crate, where
//! [`is_active`] replaces the correct behavior with a wrong one. In a build without debug
//! assertions `is_active` is the constant `false`, so that a release contains none of the bugs.
//!
//! `tests/sim/mutations.rs` activates each mutation in a process of its own and requires that some
//! seed fails.

/// Defines the mutations: the type, and the list of all of them.
macro_rules! mutations {
    ($($(#[$comment:meta])* $name:ident,)*) => {
        /// A deliberate bug.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Mutation {
            $($(#[$comment])* $name,)*
        }

        impl Mutation {
            /// All mutations.
            #[cfg_attr(not(debug_assertions), expect(dead_code, reason = "only tests use it"))]
            pub const ALL: [Mutation; [$(Mutation::$name),*].len()] = [$(Mutation::$name),*];
        }
    };
}

mutations! {
    /// A writer treats a failed write as done.
    AcknowledgeFailedWrite,
    /// A writer whose create finds an existing entry assumes that the entry is its own.
    SkipReadBack,
    /// A restore does not store in the ledger how far the files are uploaded.
    ForgetRestoredCursors,
    /// A claim ignores the entries that were written since the restore.
    ClaimOverUnseenEntries,
    /// A restore does not compare digests.
    SkipDigestCheck,
    /// A flush uploads a partial line while the agent runs.
    UploadPartialLine,
    /// A flush advances the ledger before the entry is durable.
    AdvanceLedgerBeforeWrite,
    /// A fenced writer continues on the main log after the other writer's entry.
    StayOnMainAfterFencing,
    /// A writer without a ledger claims a log without comparing the local files.
    ClaimWithoutComparison,
    /// A writer retries a write of unknown outcome with other bytes.
    RetryWithOtherBytes,
    /// A writer does not check the database fence after its write.
    SkipFenceCheckAfterWrite,
    /// A flush forgets the paths that changed during the retry of an entry.
    ForgetPathsChangedDuringRetry,
    /// A reader trusts the newest entry before it has read all entries.
    TrustNewestEntry,
    /// Every flush uploads changed files from offset 0.
    UploadFromStart,
    /// Garbage collection deletes merged entries without the grace period.
    CollectWithoutGrace,
    /// A writer that was idle does not check whether its entry was collected.
    SkipIdleCheck,
    /// A merge drops appended bytes.
    DropMergedBytes,
    /// A reader ignores the entries after the last merge.
    IgnoreEntriesAfterMerge,
    /// Garbage collection ignores pins.
    IgnorePins,
    /// A new entry is written as plaintext although keys are configured.
    WritePlaintext,
    /// A reader shows a side file before the last part of its upload.
    ShowIncompleteUpload,
    /// A reader accepts plaintext behind encrypted entries.
    AcceptPlaintext,
    /// A restore ignores that the index knows a later entry than the store.
    IgnoreWitness,
    /// A reader with trusted keys accepts objects without a valid signature.
    SkipSignatureCheck,
    /// The mirror does not write deleted rows to its files.
    ForgetDeletedRows,
}

#[cfg(debug_assertions)]
mod state {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Mutation;

    /// The active mutation as a number, counted from 1; 0 for none. It applies to the whole process, because tasks
    /// may move between threads.
    static ACTIVE: AtomicU8 = AtomicU8::new(0);

    /// Activates a mutation for the rest of the process.
    pub fn activate(mutation: Mutation) {
        ACTIVE.store(mutation as u8 + 1, Ordering::SeqCst);
    }

    /// Whether this mutation is active.
    pub fn is_active(mutation: Mutation) -> bool {
        ACTIVE.load(Ordering::Relaxed) == mutation as u8 + 1
    }
}

#[cfg(debug_assertions)]
pub use state::{activate, is_active};

/// Whether this mutation is active: never, in a build without debug assertions.
#[cfg(not(debug_assertions))]
pub const fn is_active(_: Mutation) -> bool {
    false
}
