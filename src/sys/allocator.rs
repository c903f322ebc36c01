//! The memory allocator of the C library.

/// Lets all threads share one arena.
///
/// glibc gives every thread an arena of its own and returns little of it to the system: a process
/// that has uploaded one large file would stay at several times the memory that it needs. The
/// threads of sessiond mostly wait for files and the network, so they rarely compete for the arena.
pub fn share_arena() {
    #[cfg(target_env = "gnu")]
    {
        #[expect(unsafe_code, reason = "no crate has a safe function for it")]
        // SAFETY: the call only sets a number, before any other thread exists.
        unsafe {
            libc::mallopt(libc::M_ARENA_MAX, 1);
        }
    }
}
