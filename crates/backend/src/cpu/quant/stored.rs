//! What the bytes of a stored GGUF block mean: integer codes, and the scales that belong to them.
//! Knows nothing of the layout that the kernels read; that is `layout`'s.
//!
//! Every type is brought to one form: a code `q` (unsigned, `bits` wide) an element, and per group
//! of 16 or 32 elements a scale and a minimum, so that `value = scale * q + minimum`. Types without a
//! stored minimum are symmetric around a code `zero`: `value = scale * (q - zero)`.

use crate::DType;

/// Elements of the largest stored block.
pub(super) const MAX_ELEMS: usize = 256;

/// One stored block of one row, taken apart.
#[derive(Clone)]
pub(super) struct StoredBlock {
    /// Codes in element order; the first `dtype.block_elems()` are used.
    pub(super) codes: [u8; MAX_ELEMS],
    /// f16 bits of the scale (of the super-block in K-quants).
    pub(super) d: u16,
    /// f16 bits of the minimum (Q4_1, Q5_1) or of the super-block's `dmin` (Q2_K, Q4_K, Q5_K).
    pub(super) m: u16,
    /// K-quants: the integer scale of each sub-block (signed ones as two's complement).
    pub(super) sub_scale: [u8; 16],
    /// K-quants with minima: the integer minimum of each sub-block.
    pub(super) sub_min: [u8; 16],
}

impl StoredBlock {
    /// A block whose every value is zero.
    pub(super) const ZERO: Self = Self { codes: [0; MAX_ELEMS], d: 0, m: 0, sub_scale: [0; 16], sub_min: [0; 16] };

    /// Takes apart `bytes`, one block (`dtype.block_bytes()` long) of the quantised type `dtype`.
    #[inline(always)]
    pub(super) fn read(&mut self, dtype: DType, bytes: &[u8]) {
        debug_assert_eq!(bytes.len(), dtype.block_bytes());
        match dtype {
            DType::Q4_0 => self.read_nibbles(bytes, 2, None),
            DType::Q4_1 => self.read_nibbles(bytes, 4, None),
            DType::Q5_0 => self.read_nibbles(bytes, 6, Some(2)),
            DType::Q5_1 => self.read_nibbles(bytes, 8, Some(4)),
            DType::Q8_0 => self.read_q8_0(bytes),
            DType::Q2_K => self.read_q2_k(bytes),
            DType::Q3_K => self.read_q3_k(bytes),
            DType::Q4_K => self.read_q4_k(bytes),
            DType::Q5_K => self.read_q5_k(bytes),
            DType::Q6_K => self.read_q6_k(bytes),
            DType::F32 | DType::F16 | DType::BF16 => debug_assert!(false, "{dtype} has no blocks"),
        }
    }

    /// Q4_0, Q4_1, Q5_0, Q5_1: `d`, perhaps `m`, perhaps a word of fifth bits, then 16 bytes whose low
    /// nibbles are elements 0..16 and whose high nibbles are elements 16..32.
    #[inline(always)]
    fn read_nibbles(&mut self, bytes: &[u8], nibbles_at: usize, fifth_bits_at: Option<usize>) {
        self.d = le16(bytes, 0);
        // Where there is no `m` this reads other bytes, which nobody looks at.
        self.m = le16(bytes, 2);
        let fifth =
            fifth_bits_at.map_or(0, |at| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]));
        for (j, &byte) in bytes[nibbles_at..nibbles_at + 16].iter().enumerate() {
            self.codes[j] = (byte & 15) | (bit(fifth, j) << 4);
            self.codes[j + 16] = (byte >> 4) | (bit(fifth, j + 16) << 4);
        }
    }

    #[inline(always)]
    fn read_q8_0(&mut self, bytes: &[u8]) {
        self.d = le16(bytes, 0);
        for (code, &byte) in self.codes.iter_mut().zip(&bytes[2..34]) {
            *code = byte ^ 0x80; // two's complement to offset 128
        }
    }

    /// `scales[16]` (low nibble scale, high nibble minimum), `qs[64]`, `d`, `dmin`. Byte `32n + l` of
    /// `qs` holds elements `128n + 32j + l`, two bits each, j = 0..4.
    #[inline(always)]
    fn read_q2_k(&mut self, bytes: &[u8]) {
        let (scales, qs) = (&bytes[0..16], &bytes[16..80]);
        self.d = le16(bytes, 80);
        self.m = le16(bytes, 82);
        for (i, &s) in scales.iter().enumerate() {
            self.sub_scale[i] = s & 15;
            self.sub_min[i] = s >> 4;
        }
        for e in 0..256 {
            self.codes[e] = (qs[32 * (e / 128) + e % 32] >> (2 * (e % 128 / 32))) & 3;
        }
    }

    /// `hmask[32]`, `qs[64]` as in Q2_K, `scales[12]` (16 of 6 bits, offset 32), `d`. Bit `e / 32` of
    /// `hmask[e % 32]` is the third bit.
    #[inline(always)]
    fn read_q3_k(&mut self, bytes: &[u8]) {
        let (hmask, qs, scales) = (&bytes[0..32], &bytes[32..96], &bytes[96..108]);
        self.d = le16(bytes, 108);
        for i in 0..16 {
            let low = if i < 8 { scales[i] & 15 } else { scales[i - 8] >> 4 };
            let high = (scales[8 + i % 4] >> (2 * (i / 4))) & 3;
            self.sub_scale[i] = (low | (high << 4)).wrapping_sub(32);
        }
        for e in 0..256 {
            let low = (qs[32 * (e / 128) + e % 32] >> (2 * (e % 128 / 32))) & 3;
            self.codes[e] = low | (((hmask[e % 32] >> (e / 32)) & 1) << 2);
        }
    }

    /// `d`, `dmin`, `scales[12]`, `qs[128]`: byte `32j + l` holds elements `64j + l` (low nibble) and
    /// `64j + 32 + l` (high nibble).
    #[inline(always)]
    fn read_q4_k(&mut self, bytes: &[u8]) {
        self.d = le16(bytes, 0);
        self.m = le16(bytes, 2);
        self.read_six_bit_pairs(&bytes[4..16]);
        let qs = &bytes[16..144];
        for (codes, qs) in self.codes.chunks_exact_mut(64).zip(qs.chunks_exact(32)) {
            for (l, &byte) in qs.iter().enumerate() {
                codes[l] = byte & 15;
                codes[l + 32] = byte >> 4;
            }
        }
    }

    /// As Q4_K with `qh[32]` before `qs`: bit `e / 32` of `qh[e % 32]` is the fifth bit.
    #[inline(always)]
    fn read_q5_k(&mut self, bytes: &[u8]) {
        self.d = le16(bytes, 0);
        self.m = le16(bytes, 2);
        self.read_six_bit_pairs(&bytes[4..16]);
        let (qh, qs) = (&bytes[16..48], &bytes[48..176]);
        for (j, (codes, qs)) in self.codes.chunks_exact_mut(64).zip(qs.chunks_exact(32)).enumerate() {
            for (l, (&byte, &fifth)) in qs.iter().zip(qh).enumerate() {
                codes[l] = (byte & 15) | (((fifth >> (2 * j)) & 1) << 4);
                codes[l + 32] = (byte >> 4) | (((fifth >> (2 * j + 1)) & 1) << 4);
            }
        }
    }

    /// `ql[128]`, `qh[64]`, `scales[16]` (signed), `d`. Half `n` has elements `128n + 32j + l`: the low
    /// nibbles of `ql[64n..]` are j = 0, 1, the high ones j = 2, 3; `qh[32n + l]` has two bits for each j.
    #[inline(always)]
    fn read_q6_k(&mut self, bytes: &[u8]) {
        let (ql, qh) = (&bytes[0..128], &bytes[128..192]);
        self.sub_scale.copy_from_slice(&bytes[192..208]);
        self.d = le16(bytes, 208);
        for (e, codes) in self.codes.chunks_exact_mut(32).enumerate() {
            let (n, j) = (e / 4, e % 4);
            let (ql, qh) = (&ql[64 * n + 32 * (j % 2)..][..32], &qh[32 * n..][..32]);
            for ((code, low), high) in codes.iter_mut().zip(ql).zip(qh) {
                *code = ((low >> (4 * (j / 2))) & 15) | (((high >> (2 * j)) & 3) << 4);
            }
        }
    }

    /// The eight 6-bit scales and minima of Q4_K and Q5_K in 12 bytes: the first four of each in the
    /// low six bits of bytes 0..4 and 4..8; the others' low nibbles in bytes 8..12, their upper two
    /// bits on top of bytes 0..8.
    #[inline(always)]
    fn read_six_bit_pairs(&mut self, packed: &[u8]) {
        for j in 0..4 {
            self.sub_scale[j] = packed[j] & 63;
            self.sub_min[j] = packed[j + 4] & 63;
            self.sub_scale[j + 4] = (packed[j + 8] & 15) | ((packed[j] >> 6) << 4);
            self.sub_min[j + 4] = (packed[j + 8] >> 4) | ((packed[j + 4] >> 6) << 4);
        }
    }
}

fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn bit(word: u32, at: usize) -> u8 {
    u8::from((word >> at) & 1 == 1)
}
