//! Counts allocations, so that a small input that makes the reader allocate a lot is a finding.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Maximum allocation per byte of input: the best ratio of deflate, times three for a buffer that
/// doubles while the old one still exists.
const MAX_PER_BYTE: usize = 3 * 1032;

/// Allocation that does not depend on the input.
const BASE: usize = 4 << 20;

static CURRENT: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn add(bytes: usize) {
    let current = CURRENT.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(current, Relaxed);
}

// SAFETY: every call is forwarded to the system allocator with unchanged arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        unsafe { System.alloc(layout) }
    }

    // The default implementation would write to zeroed buffers that are never used.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size);
        let new = unsafe { System.realloc(at, layout, size) };
        CURRENT.fetch_sub(layout.size(), Relaxed);
        new
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        CURRENT.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(at, layout) }
    }
}

/// Runs a check; panics if it allocates more memory than any valid input of that size needs.
pub fn bounded(check: fn(&[u8]) -> bool, input: &[u8]) {
    let before = CURRENT.load(Relaxed);
    PEAK.store(before, Relaxed);
    check(input);
    let used = PEAK.load(Relaxed).saturating_sub(before);
    let max = BASE + MAX_PER_BYTE * input.len();
    assert!(
        used <= max,
        "an input of {} bytes used {used} bytes of memory, more than {max}",
        input.len()
    );
}
