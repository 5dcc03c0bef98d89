//! No input makes the parsers hold more than twice its own size, plus a small constant: measured with an allocator
//! that counts. One test, because the count is per process.
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use pagemill_formats::testing::{GgufWriter, safetensors_image};
use pagemill_formats::{gguf, safetensors};

/// Counts live bytes; a reallocation holds old and new at once, as it does when it cannot grow in place.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system allocator unchanged; the counters do not allocate. `realloc` is the trait's
// own: alloc, copy, dealloc.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: the caller upholds the contract of `alloc`, which is passed on as it is.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: `block` came from `System.alloc` with this layout, as the caller of `dealloc` guarantees.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Entry tables of the greatest number of keys; the JSON parser's scratch for the longest string.
const CONSTANT_BYTES: usize = 4 << 20;

fn check(name: &str, bytes: &[u8], parse: impl Fn(&[u8])) {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    parse(bytes);
    let peak = PEAK.load(Relaxed) - before;
    let bound = 2 * bytes.len() + CONSTANT_BYTES;
    println!("{name}: file {} bytes, peak {peak} bytes", bytes.len());
    assert!(peak <= bound, "{name}: a file of {} bytes made {peak} bytes live", bytes.len());
}

fn parse_gguf(bytes: &[u8]) {
    let _ = gguf::parse(bytes, bytes.len() as u64, Path::new("bad.gguf"));
}

fn parse_safetensors(bytes: &[u8]) {
    let _ = safetensors::parse(bytes, bytes.len() as u64, Path::new("bad.safetensors"));
}

fn many_strings(count: usize, length: usize) -> Vec<u8> {
    let text = "x".repeat(length);
    GgufWriter::default().strings("tokens", &vec![&*text; count]).build()
}

fn one_long_string_among_claimed_ones() -> Vec<u8> {
    const TOTAL: usize = 16 << 20;
    let mut items = ((TOTAL / 4) as u64).to_le_bytes().to_vec();
    items.resize(TOTAL, b'x');
    GgufWriter::default().array("tokens", 8, (TOTAL / 16) as u64, items).build()
}

fn many_keys() -> Vec<u8> {
    (0..16_384).fold(GgufWriter::default(), |writer, key| writer.raw(&format!("{key:x}"), 0, vec![0])).build()
}

fn many_tensors() -> Vec<u8> {
    (0..50_000).fold(GgufWriter::default(), |writer, idx| writer.f32_tensor(&format!("{idx:x}"), &[1], &[0.0])).build()
}

/// The shortest entries there are: nothing but header.
fn empty_tensors(count: usize, shape: &str) -> Vec<u8> {
    let entries: Vec<String> =
        (0..count).map(|idx| format!(r#""{idx:x}":{{"dtype":"F4","shape":{shape},"data_offsets":[0,0]}}"#)).collect();
    safetensors_image(&format!("{{{}}}", entries.join(",")), &[])
}

#[test]
fn memory_is_bounded_by_the_input() {
    for (count, length) in [(2_000_000, 0), (1_000_000, 8), (100_000, 300), (10, 3_000_000), (1, 15 << 20)] {
        check(&format!("{count} strings of {length}"), &many_strings(count, length), parse_gguf);
    }
    check("claimed strings", &one_long_string_among_claimed_ones(), parse_gguf);
    check("keys", &many_keys(), parse_gguf);
    check("tensors", &many_tensors(), parse_gguf);
    for type_id in [0, 4, 7, 12] {
        let bytes = GgufWriter::default().array("numbers", type_id, 1 << 20, vec![0; 8 << 20]).build();
        check("numbers", &bytes, parse_gguf);
    }
    for shape in ["[0]", "[]", "[0,0,0,0,0,0,0,0]"] {
        for count in [1000, 130_000, 150_000] {
            check(&format!("{count} entries of shape {shape}"), &empty_tensors(count, shape), parse_safetensors);
        }
    }
    let long = format!(r#"{{"{}":0}}"#, "x".repeat(32 << 20));
    check("long name", &safetensors_image(&long, &[]), parse_safetensors);

    // Small files with a huge claim: every count and length of a sample in turn.
    let image = GgufWriter::default()
        .str("text", "abc")
        .strings("tokens", &["a"])
        .f32s("scores", &[1.0])
        .f32_tensor("w", &[8], &[0.0; 8])
        .image();
    let fields = ["n_tensors", "n_kv", "text/len", "text/value", "w/len", "w/dim0", "w/offset"].map(|mark| (mark, 0));
    for (mark, skip) in fields.into_iter().chain([("tokens/value", 4), ("tokens/value", 12), ("scores/value", 4)]) {
        for claim in [1u64 << 20, 1 << 32, 1 << 63, u64::MAX] {
            check(mark, &image.with(mark, skip, &claim.to_le_bytes()), parse_gguf);
        }
    }
    for claim in [1u64 << 20, 1 << 32, 1 << 63, u64::MAX] {
        let mut bytes = safetensors_image("{}", &[]);
        bytes[..8].copy_from_slice(&claim.to_le_bytes());
        check("header length", &bytes, parse_safetensors);
    }
}
