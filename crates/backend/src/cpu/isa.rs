//! Which instruction set the kernels use: decided once, at run time, when a backend is made. A
//! binary built on one machine runs on another.
//!
//! Sets of different families, and some within a family, do not include each other (there are machines with
//! AVX-512 VNNI and no AVX-VNNI, and the reverse), so each is asked for on its own. What integer products do
//! not need is shared: [`Isa::vectors`] says which f32 kernels go with a set.

/// An instruction set that kernels were written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust, for every machine.
    Scalar,
    /// aarch64 with NEON, which all have.
    Neon,
    /// The above with the dot product of bytes (`sdot`).
    NeonDot,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// The above with AVX-VNNI: the dot product of bytes in vectors of 256 bits.
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL with VNNI.
    Avx512Vnni,
    /// The above with AMX int8 and bf16 tiles, which the kernel has granted to this process.
    Avx512Amx,
}

/// The vectors that kernels without integer products are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
pub(crate) enum Vectors {
    /// Plain Rust.
    None,
    /// aarch64's 128 bits.
    Neon,
    /// 256 bits with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL. AVX2, FMA and F16C are there as well.
    Avx512,
}

impl Isa {
    /// Every set, those of one family from the slowest to the fastest.
    pub const ALL: [Isa; 7] =
        [Isa::Scalar, Isa::Neon, Isa::NeonDot, Isa::Avx2, Isa::AvxVnni, Isa::Avx512Vnni, Isa::Avx512Amx];

    /// The best set of this machine.
    #[must_use]
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Isa::Scalar)
    }

    /// Whether this machine can run it.
    #[must_use]
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("fma") && has!("f16c");
            let avx512 = avx2 && has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
            match self {
                Isa::Scalar => true,
                Isa::Neon | Isa::NeonDot => false,
                Isa::Avx2 => avx2,
                Isa::AvxVnni => avx2 && has!("avxvnni"),
                Isa::Avx512Vnni => avx512 && has!("avx512vnni"),
                Isa::Avx512Amx => avx512 && has!("avx512vnni") && amx_granted(),
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            use std::arch::is_aarch64_feature_detected as has;
            match self {
                Isa::Scalar => true,
                Isa::Neon => has!("neon"),
                Isa::NeonDot => has!("neon") && has!("dotprod"),
                Isa::Avx2 | Isa::AvxVnni | Isa::Avx512Vnni | Isa::Avx512Amx => false,
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            self == Isa::Scalar
        }
    }

    /// The vectors of this set.
    pub(crate) const fn vectors(self) -> Vectors {
        match self {
            Isa::Scalar => Vectors::None,
            Isa::Neon | Isa::NeonDot => Vectors::Neon,
            Isa::Avx2 | Isa::AvxVnni => Vectors::Avx2,
            Isa::Avx512Vnni | Isa::Avx512Amx => Vectors::Avx512,
        }
    }

    /// The name shown to people and written into results.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Neon => "neon",
            Isa::NeonDot => "neon-dot",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx-vnni",
            Isa::Avx512Vnni => "avx512-vnni",
            Isa::Avx512Amx => "avx512-amx",
        }
    }
}

/// Whether the processor has AMX int8 and bf16 tiles and Linux lets this process use them. The
/// grant, once given, holds for all threads; to ask again does no harm.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_set_is_available_and_none_after_it() {
        let best = Isa::detect();
        assert!(best.is_available() && Isa::Scalar.is_available());
        let after = Isa::ALL.into_iter().skip_while(|&isa| isa != best).skip(1);
        assert!(after.into_iter().all(|isa| !isa.is_available()));
    }

    #[test]
    fn every_set_is_listed_once_under_a_name_of_its_own() {
        for (i, a) in Isa::ALL.iter().enumerate() {
            assert!(Isa::ALL[..i].iter().all(|b| a != b && a.name() != b.name()), "{a:?}");
        }
    }
}
