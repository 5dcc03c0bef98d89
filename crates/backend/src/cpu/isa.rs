//! Which instruction set the kernels use: decided once, at run time, when a backend is made. A
//! binary built on one machine runs on another.

/// An instruction set that kernels were written for. Ordered: a later one includes the earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, for every machine.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL with VNNI.
    Avx512Vnni,
    /// The above with AMX int8 and bf16 tiles, which the kernel has granted to this process.
    Avx512Amx,
}

impl Isa {
    /// Every set, ascending (for tests: those up to [`Isa::detect`] can run here).
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512Vnni, Isa::Avx512Amx];

    /// The best set of this machine.
    #[must_use]
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if !(has!("avx2") && has!("fma") && has!("f16c")) {
                return Isa::Scalar;
            }
            let avx512 = has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
            if !(avx512 && has!("avx512vnni")) {
                return Isa::Avx2;
            }
            if amx_granted() { Isa::Avx512Amx } else { Isa::Avx512Vnni }
        }
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Scalar
    }

    /// Whether this machine can run it.
    #[must_use]
    pub fn is_available(self) -> bool {
        self <= Self::detect()
    }

    /// The name shown to people and written into results.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512Vnni => "avx512-vnni",
            Isa::Avx512Amx => "avx512-amx",
        }
    }
}

/// Whether the processor has AMX int8 and bf16 tiles and Linux lets this process use them. The
/// grant is asked for once and holds for all threads.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx_granted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const AMX_INT8: u32 = 1 << 25;
    let wanted = AMX_BF16 | AMX_TILE | AMX_INT8;
    if std::arch::x86_64::__cpuid_count(7, 0).edx & wanted != wanted {
        return false;
    }
    // SAFETY: asks the kernel for a permission; touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn amx_granted() -> bool {
    false
}
