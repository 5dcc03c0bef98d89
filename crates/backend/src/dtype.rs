//! Element types of tensors and weights, with their storage geometry. Decides nothing else.

/// Storage type of a tensor. Quantised types pack `block_elems` elements into `block_bytes` bytes,
/// exactly as GGUF stores them (little endian).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)] // the field's own spelling
pub enum DType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of a single.
    BF16,
    /// 4 bits, scale, 32 elements.
    Q4_0,
    /// 4 bits, scale and minimum, 32 elements.
    Q4_1,
    /// 5 bits, scale, 32 elements.
    Q5_0,
    /// 5 bits, scale and minimum, 32 elements.
    Q5_1,
    /// 8 bits, scale, 32 elements.
    Q8_0,
    /// 2 bits, 16 sub-blocks of 16 in 256 elements.
    Q2_K,
    /// 3 bits, 16 sub-blocks of 16 in 256 elements.
    Q3_K,
    /// 4 bits, 8 sub-blocks of 32 in 256 elements.
    Q4_K,
    /// 5 bits, 8 sub-blocks of 32 in 256 elements.
    Q5_K,
    /// 6 bits, 16 sub-blocks of 16 in 256 elements.
    Q6_K,
}

impl DType {
    /// Every type, in a fixed order (for tables and tests).
    pub const ALL: [DType; 13] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Q2_K,
        DType::Q3_K,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
    ];

    /// Elements in one block: 1 for floats, 32 for the legacy quants, 256 for the K-quants.
    #[must_use]
    pub const fn block_elems(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::BF16 => 1,
            DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 | DType::Q8_0 => 32,
            DType::Q2_K | DType::Q3_K | DType::Q4_K | DType::Q5_K | DType::Q6_K => 256,
        }
    }

    /// Bytes in one block.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::Q4_0 => 18,
            DType::Q4_1 => 20,
            DType::Q5_0 => 22,
            DType::Q5_1 => 24,
            DType::Q8_0 => 34,
            DType::Q2_K => 84,
            DType::Q3_K => 110,
            DType::Q4_K => 144,
            DType::Q5_K => 176,
            DType::Q6_K => 210,
        }
    }

    /// Bytes of a row of `cols` elements, or `None` when `cols` is no whole number of blocks or the
    /// product overflows.
    #[must_use]
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_elems()) {
            return None;
        }
        (cols / self.block_elems()).checked_mul(self.block_bytes())
    }

    /// Whether elements are packed in blocks with shared scales.
    #[must_use]
    pub const fn is_quantized(self) -> bool {
        self.block_elems() > 1
    }

    /// The field's name, as GGUF tools print it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::Q4_0 => "Q4_0",
            DType::Q4_1 => "Q4_1",
            DType::Q5_0 => "Q5_0",
            DType::Q5_1 => "Q5_1",
            DType::Q8_0 => "Q8_0",
            DType::Q2_K => "Q2_K",
            DType::Q3_K => "Q3_K",
            DType::Q4_K => "Q4_K",
            DType::Q5_K => "Q5_K",
            DType::Q6_K => "Q6_K",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
