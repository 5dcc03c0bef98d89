//! Host sides of the fast kernels: arguments, launch geometry, and how work is cut. Pure functions over shapes;
//! nothing here knows a driver, a stream or an allocation. Sizes repeat those of the `.cu` files, which assert
//! them.

pub(crate) mod attention_decode;
pub(crate) mod attention_plan;
pub(crate) mod attention_prefill;
pub(crate) mod decode_forms;
pub(crate) mod linear_big;
pub(crate) mod linear_mid;
pub(crate) mod linear_quant;
pub(crate) mod linear_small;
pub(crate) mod linear_wide;

use pagemill_backend::Activation;

/// A launch's geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    /// Thread blocks in x and y.
    pub(crate) grid: (u32, u32),
    /// Threads of a thread block.
    pub(crate) threads: u32,
    /// Dynamic shared memory of a thread block, in bytes; above 48 KiB the kernel's limit must be raised first.
    pub(crate) shared_bytes: u32,
}

/// A 16-bit element: of the cache, or of dense weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Half {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
}

impl Half {
    /// As kernel names spell it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

/// How an activation buffer is stored: `ActivationType` in fragments.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(dead_code)] // the kernels know more than the ops have
pub(crate) enum ActivationType {
    /// 4 bytes.
    F32 = 0,
    /// IEEE half.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
}

/// A gated layer's activation: `GateActivation` in fragments.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum GateActivation {
    /// `x * sigmoid(x)`.
    Silu = 0,
    /// The tanh form of GELU.
    GeluTanh = 1,
}

impl From<Activation> for GateActivation {
    fn from(act: Activation) -> Self {
        match act {
            Activation::Silu => Self::Silu,
            Activation::GeluTanh => Self::GeluTanh,
        }
    }
}

/// Shared memory of a multiprocessor (compute capability 9) at most, and what the driver adds to each thread block's.
const MULTIPROCESSOR_BYTES: u32 = 228 << 10;
/// See [`MULTIPROCESSOR_BYTES`].
const SYSTEM_BYTES: u32 = 1 << 10;

/// The part of a multiprocessor's memory that so many thread blocks want as shared memory, in percent: the rest may be L1
/// cache.
fn shared_percent(thread_blocks: u32, shared_bytes: u32) -> u32 {
    (thread_blocks * (shared_bytes + SYSTEM_BYTES) * 100).div_ceil(MULTIPROCESSOR_BYTES).min(100)
}
