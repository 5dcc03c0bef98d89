//! Element types as they are stored on disk, with their block geometry. Decides which types can be loaded and which
//! are only named. Does not know how a block is decoded.

use std::fmt;

/// A storage type that Pagemill loads. Quantised types pack [`block_elems`](Self::block_elems) elements into
/// [`block_bytes`](Self::block_bytes) bytes, along the last dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)] // the field's own spelling
#[allow(missing_docs)] // each variant is its own name
pub enum TensorType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
}

impl TensorType {
    /// Every loadable type.
    pub const ALL: [TensorType; 13] = [
        TensorType::F32,
        TensorType::F16,
        TensorType::BF16,
        TensorType::Q4_0,
        TensorType::Q4_1,
        TensorType::Q5_0,
        TensorType::Q5_1,
        TensorType::Q8_0,
        TensorType::Q2_K,
        TensorType::Q3_K,
        TensorType::Q4_K,
        TensorType::Q5_K,
        TensorType::Q6_K,
    ];

    /// The id in a GGUF tensor entry, the name, elements and bytes of a block.
    const fn geometry(self) -> (u32, &'static str, u32, u32) {
        match self {
            TensorType::F32 => (0, "F32", 1, 4),
            TensorType::F16 => (1, "F16", 1, 2),
            TensorType::BF16 => (30, "BF16", 1, 2),
            TensorType::Q4_0 => (2, "Q4_0", 32, 18),
            TensorType::Q4_1 => (3, "Q4_1", 32, 20),
            TensorType::Q5_0 => (6, "Q5_0", 32, 22),
            TensorType::Q5_1 => (7, "Q5_1", 32, 24),
            TensorType::Q8_0 => (8, "Q8_0", 32, 34),
            TensorType::Q2_K => (10, "Q2_K", 256, 84),
            TensorType::Q3_K => (11, "Q3_K", 256, 110),
            TensorType::Q4_K => (12, "Q4_K", 256, 144),
            TensorType::Q5_K => (13, "Q5_K", 256, 176),
            TensorType::Q6_K => (14, "Q6_K", 256, 210),
        }
    }

    /// The id in a GGUF tensor entry.
    #[must_use]
    pub const fn gguf_id(self) -> u32 {
        self.geometry().0
    }

    /// The name, as GGUF tools print it and safetensors headers spell it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.geometry().1
    }

    /// Elements in one block: 1 for floats.
    #[must_use]
    pub const fn block_elems(self) -> u32 {
        self.geometry().2
    }

    /// Bytes in one block.
    #[must_use]
    pub const fn block_bytes(self) -> u32 {
        self.geometry().3
    }

    /// Whether elements are packed in blocks with shared scales.
    #[must_use]
    pub const fn is_quantized(self) -> bool {
        self.block_elems() > 1
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A type of known name and size that Pagemill does not load: a file that holds it can be listed, not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RefusedType(u8); // index into REFUSED

struct RefusedGeometry {
    name: &'static str,
    gguf_id: Option<u32>,
    block_elems: u32,
    block_bytes: u32,
}

const fn gguf(gguf_id: u32, name: &'static str, block_elems: u32, block_bytes: u32) -> RefusedGeometry {
    RefusedGeometry { name, gguf_id: Some(gguf_id), block_elems, block_bytes }
}

const fn safetensors(name: &'static str, block_elems: u32, block_bytes: u32) -> RefusedGeometry {
    RefusedGeometry { name, gguf_id: None, block_elems, block_bytes }
}

/// Types of the two formats that are listed and not loaded. I8 to F64 exist in both.
const REFUSED: [RefusedGeometry; 38] = [
    gguf(9, "Q8_1", 32, 36),
    gguf(15, "Q8_K", 256, 292),
    gguf(16, "IQ2_XXS", 256, 66),
    gguf(17, "IQ2_XS", 256, 74),
    gguf(18, "IQ3_XXS", 256, 98),
    gguf(19, "IQ1_S", 256, 50),
    gguf(20, "IQ4_NL", 32, 18),
    gguf(21, "IQ3_S", 256, 110),
    gguf(22, "IQ2_S", 256, 82),
    gguf(23, "IQ4_XS", 256, 136),
    gguf(24, "I8", 1, 1),
    gguf(25, "I16", 1, 2),
    gguf(26, "I32", 1, 4),
    gguf(27, "I64", 1, 8),
    gguf(28, "F64", 1, 8),
    gguf(29, "IQ1_M", 256, 56),
    gguf(31, "Q4_0_4_4", 32, 18),
    gguf(32, "Q4_0_4_8", 32, 18),
    gguf(33, "Q4_0_8_8", 32, 18),
    gguf(34, "TQ1_0", 256, 54),
    gguf(35, "TQ2_0", 256, 66),
    gguf(36, "IQ4_NL_4_4", 32, 18),
    gguf(37, "IQ4_NL_4_8", 32, 18),
    gguf(38, "IQ4_NL_8_8", 32, 18),
    gguf(39, "MXFP4", 32, 17),
    gguf(40, "NVFP4", 64, 36),
    safetensors("BOOL", 1, 1),
    safetensors("U8", 1, 1),
    safetensors("U16", 1, 2),
    safetensors("U32", 1, 4),
    safetensors("U64", 1, 8),
    safetensors("C64", 1, 8),
    safetensors("F8_E4M3", 1, 1),
    safetensors("F8_E5M2", 1, 1),
    safetensors("F8_E8M0", 1, 1),
    safetensors("F6_E2M3", 4, 3),
    safetensors("F6_E3M2", 4, 3),
    safetensors("F4", 2, 1),
];

impl RefusedType {
    fn find(matches: impl Fn(&RefusedGeometry) -> bool) -> Option<Self> {
        let idx = REFUSED.iter().position(matches)?;
        u8::try_from(idx).ok().map(Self)
    }

    /// The type's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        REFUSED[usize::from(self.0)].name
    }
}

/// The storage type of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoredType {
    /// Pagemill loads it.
    Loadable(TensorType),
    /// Pagemill only lists it.
    Refused(RefusedType),
}

impl StoredType {
    /// By the id in a GGUF tensor entry; `None` when its size is not known.
    #[must_use]
    pub fn from_gguf_id(id: u32) -> Option<Self> {
        let loadable = TensorType::ALL.into_iter().find(|ty| ty.gguf_id() == id);
        loadable.map(Self::Loadable).or_else(|| RefusedType::find(|ty| ty.gguf_id == Some(id)).map(Self::Refused))
    }

    /// By the dtype in a safetensors header; `None` when its size is not known.
    #[must_use]
    pub fn from_safetensors_name(name: &str) -> Option<Self> {
        let loadable = match name {
            "F32" => Some(TensorType::F32),
            "F16" => Some(TensorType::F16),
            "BF16" => Some(TensorType::BF16),
            _ => None,
        };
        let plain = ["I8", "I16", "I32", "I64", "F64"];
        let listed = |ty: &RefusedGeometry| ty.name == name && (ty.gguf_id.is_none() || plain.contains(&name));
        loadable.map(Self::Loadable).or_else(|| RefusedType::find(listed).map(Self::Refused))
    }

    /// The type's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            StoredType::Loadable(ty) => ty.name(),
            StoredType::Refused(ty) => ty.name(),
        }
    }

    /// Elements in one block.
    #[must_use]
    pub fn block_elems(self) -> u32 {
        match self {
            StoredType::Loadable(ty) => ty.block_elems(),
            StoredType::Refused(ty) => REFUSED[usize::from(ty.0)].block_elems,
        }
    }

    /// Bytes in one block.
    #[must_use]
    pub fn block_bytes(self) -> u32 {
        match self {
            StoredType::Loadable(ty) => ty.block_bytes(),
            StoredType::Refused(ty) => REFUSED[usize::from(ty.0)].block_bytes,
        }
    }

    /// Bytes of `elems` consecutive elements; `None` when they are no whole number of blocks or the product overflows.
    #[must_use]
    pub fn bytes_of(self, elems: u64) -> Option<u64> {
        let block_elems = u64::from(self.block_elems());
        if !elems.is_multiple_of(block_elems) {
            return None;
        }
        (elems / block_elems).checked_mul(u64::from(self.block_bytes()))
    }
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
