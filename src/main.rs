//! The binary. Everything is in the library.

use std::process::ExitCode;

/// The allocator: one heap for all threads. An allocator with a heap per thread keeps the freed
/// memory of each, and sessiond has many short-lived threads that read and encode files: with ninety
/// thousand files, the process would use three times the memory of its heap. sessiond allocates too
/// little for the lock of one heap to matter.
#[global_allocator]
static ALLOCATOR: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

fn main() -> ExitCode {
    sessiond::run_command_line()
}
