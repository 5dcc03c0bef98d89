//! What this machine does at most: bytes read, f32 and int8 operations, a second, over all threads.
//! Measured by loops that do nothing else; kernels are judged against them. Not an API: for
//! `pagemill bench kernels`. Knows no kernel and no tensor.

use super::Isa;
use super::memory::AlignedBytes;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Words of eight bytes that one pass of the reading loop adds at a time.
const LANES: usize = 32;

/// Bytes a second that `num_threads` threads read together, each passing over its own share of
/// `buffer_bytes` (allocated and written first), for about `duration` in all. A buffer well beyond the caches
/// gives the memory's figure, a smaller one that of the cache it fits. The best of several distances at which
/// the loop asks for memory ahead: without, one core's misses in flight are too few for a far cache.
#[must_use]
#[allow(clippy::cast_precision_loss)] // byte counts
pub fn read_bytes_per_second(isa: Isa, num_threads: usize, buffer_bytes: usize, duration: Duration) -> f64 {
    let words = (buffer_bytes / 8 / num_threads.max(1)).max(LANES);
    let sum = pick_sum(isa);
    let (start, threads) = (Barrier::new(num_threads.max(1)), num_threads.max(1));
    let part = duration / u32::try_from(AHEAD_BYTES.len()).unwrap_or(1);
    let work = || {
        // As the weights lie: on huge pages where the system has them.
        let mut share = AlignedBytes::zeroed(words * 8, "a buffer to read").ok();
        if let Some(share) = &mut share {
            share.as_mut_slice().fill(1);
        }
        let share = share.as_ref().map_or(&[][..], AlignedBytes::as_slice);
        AHEAD_BYTES.map(|ahead| {
            start.wait();
            rate(part, || {
                black_box(sum(black_box(share), ahead));
                share.len() as f64
            })
        })
    };
    let rates = on_threads(threads, &work);
    (0..AHEAD_BYTES.len()).map(|i| rates.iter().map(|rates| rates[i]).sum()).fold(0.0, f64::max)
}

/// Distances tried, in bytes; 0: the hardware is left alone.
const AHEAD_BYTES: [usize; 5] = [0, 512, 1024, 2048, 4096];

/// The vectors are the compiler's: `inline(always)`, so that they are those of the caller.
#[inline(always)]
fn sum(bytes: &[u8], ahead: usize, prefetch: impl Fn(*const u8)) -> u64 {
    let mut lanes = [0_u64; LANES];
    for chunk in bytes.chunks_exact(LANES * 8) {
        if ahead > 0 {
            for line in (0..LANES * 8).step_by(64) {
                prefetch(chunk.as_ptr().wrapping_add(ahead + line));
            }
        }
        for (lane, word) in lanes.iter_mut().zip(chunk.chunks_exact(8)) {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(word);
            *lane = lane.wrapping_add(u64::from_le_bytes(bytes));
        }
    }
    lanes.iter().fold(0, |a, b| a.wrapping_add(*b))
}

/// f32 operations a second (a fused multiply-add is two) with the vectors of `isa`. `None`: no loop was
/// written for it, or this machine lacks it.
#[must_use]
pub fn f32_ops_per_second(isa: Isa, num_threads: usize, duration: Duration) -> Option<f64> {
    let kernel = pick(isa, Number::F32)?;
    Some(peak(kernel, num_threads, duration))
}

/// int8 multiply-add operations a second (multiplication and addition count one each) with the best
/// instruction of `isa`. `None`: as for [`f32_ops_per_second`].
#[must_use]
pub fn int8_ops_per_second(isa: Isa, num_threads: usize, duration: Duration) -> Option<f64> {
    let kernel = pick(isa, Number::Int8)?;
    Some(peak(kernel, num_threads, duration))
}

#[derive(Clone, Copy)]
enum Number {
    F32,
    Int8,
}

/// A loop without memory traffic.
#[derive(Clone, Copy)]
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))] // no loop was written for other machines
struct Kernel {
    /// Runs [`ROUNDS`] rounds.
    run: fn(),
    /// Operations of one round.
    ops: f64,
}

/// Rounds of a kernel between two looks at the clock.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
const ROUNDS: usize = 10_000;

#[allow(clippy::cast_precision_loss)] // a small constant
fn peak(kernel: Kernel, num_threads: usize, duration: Duration) -> f64 {
    let start = Barrier::new(num_threads.max(1));
    let work = || {
        (kernel.run)(); // wakes the wide units
        start.wait();
        rate(duration, || {
            (kernel.run)();
            kernel.ops * ROUNDS as f64
        })
    };
    on_threads(num_threads, &work).iter().sum()
}

/// Units a second of `pass`, which says how many it did, repeated for `duration` (twice at least).
fn rate(duration: Duration, mut pass: impl FnMut() -> f64) -> f64 {
    let start = Instant::now();
    let mut done = pass();
    loop {
        done += pass();
        let elapsed = start.elapsed();
        if elapsed >= duration {
            return done / elapsed.as_secs_f64();
        }
    }
}

/// What `work` gives on each of `num_threads` threads at once.
fn on_threads<T: Send>(num_threads: usize, work: &(dyn Fn() -> T + Sync)) -> Vec<T> {
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..num_threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        // A thread that panicked has already said so.
        std::iter::once(own).chain(others.into_iter().filter_map(|thread| thread.join().ok())).collect()
    })
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn pick_sum(_isa: Isa) -> fn(&[u8], usize) -> u64 {
    |bytes, ahead| sum(bytes, ahead, |_| {})
}

#[cfg(target_arch = "aarch64")]
fn pick_sum(_isa: Isa) -> fn(&[u8], usize) -> u64 {
    |bytes, ahead| sum(bytes, ahead, super::neon::prefetch)
}

#[cfg(target_arch = "x86_64")]
fn pick_sum(isa: Isa) -> fn(&[u8], usize) -> u64 {
    match isa {
        Isa::Avx512Vnni | Isa::Avx512Amx if isa.is_available() => x86::sum_avx512,
        Isa::Avx2 | Isa::AvxVnni if isa.is_available() => x86::sum_avx2,
        _ => |bytes, ahead| sum(bytes, ahead, x86::prefetch),
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn pick(_isa: Isa, _number: Number) -> Option<Kernel> {
    None
}

#[cfg(target_arch = "aarch64")]
fn pick(isa: Isa, number: Number) -> Option<Kernel> {
    match (isa, number) {
        _ if !isa.is_available() => None,
        (Isa::Neon | Isa::NeonDot, Number::F32) => Some(neon::F32),
        (Isa::Neon, Number::Int8) => Some(neon::INT8),
        (Isa::NeonDot, Number::Int8) => Some(neon::INT8_DOT),
        _ => None,
    }
}

#[cfg(target_arch = "x86_64")]
fn pick(isa: Isa, number: Number) -> Option<Kernel> {
    if !isa.is_available() {
        return None;
    }
    match (isa, number) {
        (Isa::Scalar | Isa::Neon | Isa::NeonDot, _) => None,
        (Isa::Avx2 | Isa::AvxVnni, Number::F32) => Some(x86::F32_AVX2),
        (Isa::AvxVnni, Number::Int8) => Some(x86::INT8_AVX_VNNI),
        (Isa::Avx2, Number::Int8) => Some(x86::INT8_AVX2),
        (Isa::Avx512Vnni | Isa::Avx512Amx, Number::F32) => Some(x86::F32_AVX512),
        (Isa::Avx512Vnni, Number::Int8) => Some(x86::INT8_VNNI),
        (Isa::Avx512Amx, Number::Int8) => Some(x86::INT8_AMX),
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Kernel, ROUNDS};
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// Independent chains: more than latency times units.
    const CHAINS: usize = 12;

    pub(super) const F32_AVX2: Kernel = Kernel {
        run: || {
            // SAFETY: `pick` hands a kernel out only where its instruction set is available.
            unsafe { f32_avx2() }
        },
        ops: (CHAINS * 8 * 2) as f64,
    };
    pub(super) const F32_AVX512: Kernel = Kernel {
        run: || {
            // SAFETY: `pick` hands a kernel out only where its instruction set is available.
            unsafe { f32_avx512() }
        },
        ops: (CHAINS * 16 * 2) as f64,
    };
    pub(super) const INT8_AVX2: Kernel = Kernel {
        run: || {
            // SAFETY: `pick` hands a kernel out only where its instruction set is available.
            unsafe { int8_avx2() }
        },
        ops: (CHAINS * 32 * 2) as f64,
    };
    pub(super) const INT8_AVX_VNNI: Kernel = Kernel {
        run: || {
            // SAFETY: `pick` hands a kernel out only where its instruction set is available.
            unsafe { int8_avx_vnni() }
        },
        ops: (CHAINS * 32 * 2) as f64,
    };
    pub(super) const INT8_VNNI: Kernel = Kernel {
        run: || {
            // SAFETY: `pick` hands a kernel out only where its instruction set is available.
            unsafe { int8_vnni() }
        },
        ops: (CHAINS * 64 * 2) as f64,
    };
    /// Four products of full tiles: 16 rows by 16 columns by 64 codes.
    pub(super) const INT8_AMX: Kernel = Kernel { run: int8_amx, ops: (4 * 16 * 16 * 64 * 2) as f64 };

    #[target_feature(enable = "avx2,fma")]
    fn f32_avx2() {
        let (a, b) = (_mm256_set1_ps(black_box(0.999)), _mm256_set1_ps(black_box(0.001)));
        let mut acc = [a; CHAINS];
        for _ in 0..ROUNDS {
            for acc in &mut acc {
                *acc = _mm256_fmadd_ps(*acc, a, b);
            }
        }
        black_box(acc);
    }

    #[target_feature(enable = "avx512f")]
    fn f32_avx512() {
        let (a, b) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(0.001)));
        let mut acc = [a; CHAINS];
        for _ in 0..ROUNDS {
            for acc in &mut acc {
                *acc = _mm512_fmadd_ps(*acc, a, b);
            }
        }
        black_box(acc);
    }

    /// maddubs, madd and add, as a kernel without VNNI has to.
    #[target_feature(enable = "avx2")]
    fn int8_avx2() {
        let (ones, b) = (_mm256_set1_epi16(black_box(1)), _mm256_set1_epi8(black_box(3)));
        let mut a = _mm256_set1_epi8(black_box(5));
        let mut acc = [_mm256_setzero_si256(); CHAINS];
        for _ in 0..ROUNDS {
            for acc in &mut acc {
                // SAFETY: no instruction at all; the compiler may not know that `a` stays what it is, and so
                // cannot take its products out of the loop.
                unsafe { asm!("/* {0} */", inout(ymm_reg) a, options(nomem, nostack, preserves_flags)) };
                *acc = _mm256_add_epi32(*acc, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
            }
        }
        black_box(acc);
    }

    #[target_feature(enable = "avx2,avxvnni")]
    fn int8_avx_vnni() {
        let (a, b) = (_mm256_set1_epi8(black_box(5)), _mm256_set1_epi8(black_box(3)));
        let mut acc = [_mm256_setzero_si256(); CHAINS];
        for _ in 0..ROUNDS {
            for acc in &mut acc {
                *acc = _mm256_dpbusd_avx_epi32(*acc, a, b);
            }
        }
        black_box(acc);
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    fn int8_vnni() {
        let (a, b) = (_mm512_set1_epi8(black_box(5)), _mm512_set1_epi8(black_box(3)));
        let mut acc = [_mm512_setzero_si512(); CHAINS];
        for _ in 0..ROUNDS {
            for acc in &mut acc {
                *acc = _mm512_dpbusd_epi32(*acc, a, b);
            }
        }
        black_box(acc);
    }

    /// Asks for a cache line.
    pub(super) fn prefetch(at: *const u8) {
        // SAFETY: SSE is part of the baseline; a prefetch reads nothing that a program can see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }

    /// The reading loop with AVX2; only for `pick_sum`.
    pub(super) fn sum_avx2(bytes: &[u8], ahead: usize) -> u64 {
        #[target_feature(enable = "avx2")]
        fn with_avx2(bytes: &[u8], ahead: usize) -> u64 {
            super::sum(bytes, ahead, prefetch)
        }
        // SAFETY: `pick_sum` hands this out only where AVX2 is available.
        unsafe { with_avx2(bytes, ahead) }
    }

    /// The reading loop with AVX-512; only for `pick_sum`.
    pub(super) fn sum_avx512(bytes: &[u8], ahead: usize) -> u64 {
        #[target_feature(enable = "avx512f")]
        fn with_avx512(bytes: &[u8], ahead: usize) -> u64 {
            super::sum(bytes, ahead, prefetch)
        }
        // SAFETY: `pick_sum` hands this out only where AVX-512 is available.
        unsafe { with_avx512(bytes, ahead) }
    }

    /// Palette 1 as `ldtilecfg` reads it: eight full tiles.
    #[repr(C, align(64))]
    struct FullTiles {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    fn int8_amx() {
        let mut config = FullTiles { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..8].fill(64);
        config.rows[..8].fill(16);
        // SAFETY: `pick` hands this kernel out only where Linux granted the tiles to this process; the
        // configuration is valid; nobody uses tiles across calls, and they are released at the end.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly, preserves_flags));
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
                "2:",
                "tdpbssd tmm0, tmm4, tmm6",
                "tdpbssd tmm1, tmm4, tmm7",
                "tdpbssd tmm2, tmm5, tmm6",
                "tdpbssd tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                "tilerelease",
                rounds = inout(reg) ROUNDS => _,
                options(nostack, nomem),
            );
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::{Kernel, ROUNDS};
    use std::arch::aarch64::*;
    use std::arch::asm;
    use std::hint::black_box;

    /// Independent chains: at least latency times units.
    const CHAINS: usize = 16;

    pub(super) const F32: Kernel = Kernel {
        run: || {
            // SAFETY: `pick` hands a kernel out only where its instruction set is available.
            unsafe { f32_fma() }
        },
        ops: (CHAINS * 4 * 2) as f64,
    };
    /// A widening multiply-add takes 8 codes, and its sums must be added up to i32 after every fourth.
    pub(super) const INT8: Kernel = Kernel {
        run: || {
            // SAFETY: `pick` hands a kernel out only where its instruction set is available.
            unsafe { int8_widening() }
        },
        ops: (CHAINS / 2 * 4 * 8 * 2) as f64,
    };
    pub(super) const INT8_DOT: Kernel = Kernel {
        run: || {
            // SAFETY: `pick` hands a kernel out only where its instruction set is available.
            unsafe { int8_dot() }
        },
        ops: (CHAINS * 16 * 2) as f64,
    };

    #[target_feature(enable = "neon")]
    fn f32_fma() {
        let (a, b) = (vdupq_n_f32(black_box(0.999)), vdupq_n_f32(black_box(0.001)));
        let mut acc = [a; CHAINS];
        for _ in 0..ROUNDS {
            for acc in &mut acc {
                *acc = vfmaq_f32(b, *acc, a);
            }
        }
        black_box(acc);
    }

    #[target_feature(enable = "neon")]
    fn int8_widening() {
        let b = vdup_n_s8(black_box(3));
        let mut a = vdup_n_s8(black_box(5));
        let mut acc = [vdupq_n_s32(0); CHAINS / 2];
        for _ in 0..ROUNDS {
            for acc in &mut acc {
                let mut products = vdupq_n_s16(0);
                for _ in 0..4 {
                    // SAFETY: no instruction at all; the compiler may not know that `a` stays what it is, and so
                    // cannot take its products out of the loop.
                    unsafe { asm!("/* {0:v} */", inout(vreg) a, options(nomem, nostack, preserves_flags)) };
                    products = vmlal_s8(products, a, b);
                }
                *acc = vpadalq_s16(*acc, products);
            }
        }
        black_box(acc);
    }

    #[target_feature(enable = "neon")]
    fn int8_dot() {
        let (a, b) = (vdupq_n_s8(black_box(5)), vdupq_n_s8(black_box(3)));
        let mut acc = [vdupq_n_s32(0); CHAINS];
        for _ in 0..ROUNDS {
            for acc in &mut acc {
                // SAFETY: works on the registers named; `pick` saw to the instruction.
                unsafe {
                    asm!(".arch_extension dotprod", "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
                        inout(vreg) *acc, in(vreg) a, in(vreg) b, options(pure, nomem, nostack, preserves_flags));
                }
            }
        }
        black_box(acc);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_available_set_has_peaks_in_order() {
        let short = Duration::from_millis(5);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let peaks = (f32_ops_per_second(isa, 2, short), int8_ops_per_second(isa, 2, short));
            match peaks {
                (Some(f32), Some(int8)) => assert!(f32 > 1e6 && int8 > 1e6, "{isa:?}: {f32} {int8}"),
                _ => assert!(isa == Isa::Scalar && peaks == (None, None), "{isa:?}: {peaks:?}"),
            }
        }
    }

    #[test]
    fn reading_is_counted_in_bytes() {
        let rate = read_bytes_per_second(Isa::detect(), 2, 1 << 16, Duration::from_millis(5));
        assert!(rate.is_finite() && rate > 1e7, "{rate}");
        assert_eq!(sum(&[[1, 0, 0, 0, 0, 0, 0, 0]; 4 * LANES].concat(), 64, |_| {}), 4 * LANES as u64);
    }
}
