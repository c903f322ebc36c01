//! Blocking work: reading, hashing and compressing files.
//!
//! Owns where such work runs. A thread that polls tasks must not run it: probes and the flushes of
//! other sessions would wait.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Runs `work`, which may read many files or compress megabytes, while other threads poll the tasks
/// of the runtime. The calling task waits for it.
///
/// A runtime with one thread, such as that of the simulation, has no other thread. It runs `work` in
/// place, so that the order of all steps is deterministic.
pub fn blocking<T>(work: impl FnOnce() -> T) -> T {
    let has_other_threads = Handle::try_current()
        .is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::MultiThread);
    if has_other_threads {
        tokio::task::block_in_place(work)
    } else {
        work()
    }
}
