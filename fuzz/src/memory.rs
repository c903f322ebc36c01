//! Counts what is allocated, so that a small input that makes the reader ask for a lot is a finding.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Deflate's best ratio, and a buffer that grew by doubling while the old one was still there.
const PER_BYTE: usize = 3 * 1032;

/// Buffers that are there whatever the input.
const ALWAYS: usize = 4 << 20;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn grown(by: usize) {
    let now = NOW.fetch_add(by, Relaxed) + by;
    PEAK.fetch_max(now, Relaxed);
}

// SAFETY: every call goes to the system's allocator with the caller's own arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        unsafe { System.alloc(layout) }
    }

    // Without this, buffers of zeroes that are never touched would be written to.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grown(size);
        let new = unsafe { System.realloc(at, layout, size) };
        NOW.fetch_sub(layout.size(), Relaxed);
        new
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(at, layout) }
    }
}

/// Runs a check on an input; panics if it took more memory than any honest input of that size.
pub fn bounded(check: fn(&[u8]) -> bool, input: &[u8]) {
    let before = NOW.load(Relaxed);
    PEAK.store(before, Relaxed);
    check(input);
    let took = PEAK.load(Relaxed).saturating_sub(before);
    let most = ALWAYS + PER_BYTE * input.len();
    assert!(
        took <= most,
        "an input of {} bytes took {took} bytes of memory, more than {most}",
        input.len()
    );
}
