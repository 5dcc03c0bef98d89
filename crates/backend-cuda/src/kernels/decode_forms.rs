//! Decode attention: which form of the kernel runs, and its launch. Decides by the number of sequences, by whether one
//! of them is long, and by what the chip holds at once; measured in `kernels/NOTES.md`. Kernel:
//! `kernels/attention_decode.cu`.

#![allow(clippy::cast_possible_truncation)] // counts of sequences: the batch was checked to fit when it was uploaded

use super::attention_decode::{DecodeSeq, max_slots, tiles_of};
use super::{Half, Launch, shared_percent};

/// Warps of a thread block of the split forms: `SPLIT_WARPS`.
const SPLIT_WARPS: u32 = 4;
/// Warps on a multiprocessor in the dense forms.
const DENSE_WARPS: u32 = 16;
/// Forms of fewer warps a thread block are for sequences of about one length: none is cut into more pieces than this,
/// which the few warps would have to add up.
const MAX_SHARES: u64 = 4;
/// Warps of a thread block of the whole forms: `WHOLE_WARPS`.
const WHOLE_WARPS: u32 = 8;
/// The longest sequence that is not cut, as long as there is a cluster or thread block for each: so many tiles for each
/// of its warps.
const WHOLE_TILES_A_WARP: u32 = 4;

/// How sequences are spread over thread blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Form {
    /// Pieces of sequences, as many thread blocks as are resident at once.
    Split,
    /// The same with 16 warps on each multiprocessor, of fewer registers, in thread blocks of so many: where there are
    /// enough sequences, each is one warp's or two, which have nothing to add up between them.
    SplitDense(u32),
    /// Each sequence whole, by so many thread blocks: 1, or a cluster of 2 or 4.
    Whole(u32),
}

/// Whose kernels: a layer's shape, and what the chip has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DecodeShape {
    /// Elements of the cache.
    kv: Half,
    /// E.
    head_dim: u32,
    /// Query heads of a KV head that one thread block takes: 8 or 16.
    heads: u32,
    /// Whether the chip has clusters.
    clusters: bool,
}

/// A compiled form of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DecodeVariant {
    /// Elements of the cache.
    pub(crate) kv: Half,
    /// E.
    pub(crate) head_dim: u32,
    /// Query heads of a KV head that one thread block takes: 8 or 16.
    pub(crate) heads: u32,
    form: Form,
}

impl DecodeShape {
    /// Every shape there is.
    fn all(clusters: bool) -> impl Iterator<Item = Self> {
        let sizes = [(64, 8), (80, 8), (96, 8), (128, 8), (256, 8), (64, 16), (80, 16), (96, 16), (128, 16)];
        let of_kv = move |kv| sizes.into_iter().map(move |(head_dim, heads)| Self { kv, head_dim, heads, clusters });
        [Half::Bf16, Half::F16].into_iter().flat_map(of_kv)
    }

    /// The shape's kernels; `None` where there are none. `group` is H / K; `clusters`: the chip has them.
    pub(crate) fn select(kv: Half, head_dim: u32, group: u32, clusters: bool) -> Option<Self> {
        let heads = if group > 8 && head_dim != 256 { 16 } else { 8 };
        matches!(head_dim, 64 | 80 | 96 | 128 | 256).then_some(Self { kv, head_dim, heads, clusters })
    }

    fn variant(&self, form: Form) -> DecodeVariant {
        DecodeVariant { kv: self.kv, head_dim: self.head_dim, heads: self.heads, form }
    }

    /// The forms there are, those for the fewest sequences first.
    fn forms(&self) -> &'static [Form] {
        use Form::{Split, SplitDense, Whole};
        match (self.head_dim, self.heads, self.clusters) {
            (128, 8, true) => &[Whole(4), Whole(2), Whole(1), Split, SplitDense(4), SplitDense(2), SplitDense(1)],
            (128, 8, false) => &[Whole(1), Split, SplitDense(4), SplitDense(2), SplitDense(1)],
            (64, 8, true) => &[Whole(4), Whole(2), Whole(1), Split, SplitDense(2), SplitDense(1)],
            (64, 8, false) => &[Whole(1), Split, SplitDense(2), SplitDense(1)],
            (256, 8, true) => &[Whole(4), Whole(2), Whole(1), Split],
            (256, 8, false) => &[Whole(1), Split],
            _ => &[Split],
        }
    }

    /// The form for a step, and how many units of one KV head (thread blocks, or clusters) a plan for it has: the
    /// first that has a unit for each sequence; whole sequences only where none is long.
    pub(crate) fn choose(
        &self,
        seqs: &[DecodeSeq],
        window: Option<u32>,
        heads: HeadCounts,
        num_sms: u32,
    ) -> (DecodeVariant, u32) {
        let (mut total, mut longest) = (0u64, 0u32);
        for (first, end) in seqs.iter().map(|seq| tiles_of(seq, window)) {
            total += u64::from(end - first);
            longest = longest.max(end - first);
        }
        let num_seqs = seqs.len() as u32;
        let mut last = (self.variant(Form::Split), 1);
        for &form in self.forms() {
            let variant = self.variant(form);
            let units = variant.units(heads, num_sms);
            let suits = match form {
                Form::Whole(cluster) => longest <= WHOLE_TILES_A_WARP * WHOLE_WARPS * cluster,
                Form::Split | Form::SplitDense(SPLIT_WARPS) => true,
                Form::SplitDense(_) => u64::from(longest) * u64::from(units) <= MAX_SHARES * total,
            };
            if !suits {
                continue;
            }
            if num_seqs <= units {
                return (variant, if matches!(form, Form::Whole(_)) { num_seqs } else { units });
            }
            last = (variant, units);
        }
        last
    }

    /// The most slots that a plan has.
    pub(crate) fn max_slots(&self, heads: HeadCounts, num_sms: u32) -> u32 {
        let units = self.forms().iter().map(|&form| self.variant(form).units(heads, num_sms));
        units.max().map_or(0, max_slots)
    }
}

/// Heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeadCounts {
    /// H.
    pub(crate) query: u32,
    /// K; divides H.
    pub(crate) kv: u32,
}

impl DecodeVariant {
    /// Every variant there is; those in clusters where the chip has them.
    pub(crate) fn all(clusters: bool) -> Vec<Self> {
        DecodeShape::all(clusters)
            .flat_map(|shape| shape.forms().iter().map(move |&form| shape.variant(form)))
            .collect()
    }

    /// The kernel's name.
    pub(crate) fn name(&self) -> String {
        let form = match self.form {
            Form::Split => String::new(),
            Form::SplitDense(warps) => format!("_dense{warps}"),
            Form::Whole(cluster) => format!("_whole{cluster}"),
        };
        format!("attention_decode_{}_e{}_h{}{form}", self.kv.name(), self.head_dim, self.heads)
    }

    /// Whether sequences are not cut.
    pub(crate) fn is_whole(&self) -> bool {
        matches!(self.form, Form::Whole(_))
    }

    /// Thread blocks of a unit, and warps of each.
    fn unit(&self) -> (u32, u32) {
        match self.form {
            Form::Split => (1, SPLIT_WARPS),
            Form::SplitDense(warps) => (1, warps),
            Form::Whole(cluster) => (cluster, WHOLE_WARPS),
        }
    }

    /// Warps of a unit.
    pub(crate) fn warps(&self) -> u32 {
        let (thread_blocks, warps) = self.unit();
        thread_blocks * warps
    }

    /// Thread blocks that are resident at once.
    fn resident(&self, num_sms: u32) -> u32 {
        num_sms
            * match (self.form, self.head_dim, self.heads) {
                // Multiprocessors that are one short of a cluster stay empty.
                (Form::Whole(4), ..) => return num_sms * 3 / 4,
                (Form::Whole(_), ..) => 1,
                (Form::SplitDense(warps), ..) => DENSE_WARPS / warps,
                (_, 64 | 80, 8) => 4,
                (_, 96 | 128, 8) | (_, 64 | 80 | 96, _) => 3,
                _ => 2,
            }
    }

    /// The grid's y: KV heads, times the parts a large group is cut into.
    pub(crate) fn grid_y(&self, heads: HeadCounts) -> u32 {
        heads.kv * (heads.query / heads.kv).div_ceil(self.heads)
    }

    /// Units of one KV head that are resident at once.
    fn units(&self, heads: HeadCounts, num_sms: u32) -> u32 {
        (self.resident(num_sms) / self.unit().0 / self.grid_y(heads)).max(1)
    }

    /// The launch for a plan of `units` units a KV head.
    pub(crate) fn launch(&self, heads: HeadCounts, units: u32) -> Launch {
        let (cluster, warps) = self.unit();
        Launch { grid: (units * cluster, self.grid_y(heads)), threads: warps * 32, shared_bytes: self.shared_bytes() }
    }

    /// `sizeof(DecodeShared)`: q, q of the next piece, the warps' (max, sum) and outputs unless there is but one, weights,
    /// those of a cluster twice, a flag.
    pub(crate) fn shared_bytes(&self) -> u32 {
        let q = self.heads * (self.head_dim / 2 + 16) * 4 + self.heads * self.head_dim * 2;
        let (cluster, warps) = self.unit();
        let published = if warps > 1 { warps * self.heads * (8 + (self.head_dim + 4) * 4) } else { 16 };
        let gathered = if cluster > 1 { 2 * cluster * self.heads * (8 + self.head_dim * 4) } else { 0 };
        (q + published + self.heads * 8 + gathered + 2).next_multiple_of(16)
    }
    /// The part of a multiprocessor's memory that the kernel wants as shared memory, in percent; `None`: no wish. K and V
    /// go straight to registers, and of what is on its way the L1 cache must have room for all (128 KB): after a kernel
    /// that takes nearly everything as shared memory, and left as it is, split forms read at 3.8 instead of 4.4 TB/s.
    pub(crate) fn shared_percent(&self) -> Option<u32> {
        (!self.is_whole()).then(|| shared_percent(self.resident(1), self.shared_bytes()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap is a failed test
mod tests {
    use super::super::attention_decode::DecodePlan;
    use super::super::attention_decode::tests::{check, seqs};
    use super::*;

    const HEADS: HeadCounts = HeadCounts { query: 32, kv: 8 };

    fn shape(clusters: bool) -> DecodeShape {
        DecodeShape::select(Half::Bf16, 128, 4, clusters).unwrap()
    }

    #[test]
    fn few_short_sequences_stay_whole() {
        let form = |num_seqs: usize, longest: u32, clusters: bool| {
            let mut lens = vec![40; num_seqs];
            lens[num_seqs / 2] = longest;
            let (variant, units) = shape(clusters).choose(&seqs(&lens), None, HEADS, 132);
            (variant.form, units)
        };
        assert_eq!([1, 2, 3].map(|n| form(n, 300, true)), [1, 2, 3].map(|n| (Form::Whole(4), n)));
        assert_eq!([1, 3].map(|n| form(n, 2048, true)), [1, 3].map(|n| (Form::Whole(4), n as u32)));
        assert_eq!([4, 8].map(|n| form(n, 1024, true)), [4, 8].map(|n| (Form::Whole(2), n as u32)));
        assert_eq!([9, 16].map(|n| form(n, 512, true)), [9, 16].map(|n| (Form::Whole(1), n as u32)));
        assert_eq!([1, 16].map(|n| form(n, 512, false)), [1, 16].map(|n| (Form::Whole(1), n as u32)));
        // One that is long, or more than there are thread blocks for.
        assert_eq!([1, 3, 16, 49].map(|n| form(n, 2049, true)), [(Form::Split, 49); 4]);
        assert_eq!([(8, 1025), (16, 513)].map(|(n, longest)| form(n, longest, true)), [(Form::Split, 49); 2]);
        assert_eq!(form(17, 40, true), (Form::Split, 49));
        assert_eq!([50, 66].map(|n| form(n, 40, true)), [(Form::SplitDense(4), 66); 2]);
        assert_eq!([67, 132].map(|n| form(n, 40, true)), [(Form::SplitDense(2), 132); 2]);
        assert_eq!([133, 256, 1000].map(|n| form(n, 40, true)), [(Form::SplitDense(1), 264); 3]);
        // One that would be cut into many pieces.
        assert_eq!([100, 256].map(|n| form(n, 4096, true)), [(Form::SplitDense(4), 66); 2]);
        assert_eq!(form(256, 128, true), (Form::SplitDense(1), 264));
        // What a window hides is not counted.
        let (variant, _) = shape(true).choose(&seqs(&[100_000]), Some(512), HEADS, 132);
        assert!(variant.is_whole());
    }

    #[test]
    fn whole_sequences_have_one_piece_each() {
        let lens = [17, 1024, 1, 300];
        let (variant, units) = shape(true).choose(&seqs(&lens), None, HEADS, 132);
        let mut plan = DecodePlan::default();
        plan.make(&seqs(&lens), None, variant, units);
        check(&plan, &seqs(&lens), None, 4);
        assert_eq!((plan.pieces.len(), plan.num_slots, &plan.piece_start[..]), (4, 0, &[0, 1, 2, 3, 4][..]));
    }

    #[test]
    fn variants_and_their_launches() {
        let v = shape(true).variant(Form::Split);
        assert_eq!(v.name(), "attention_decode_bf16_e128_h8");
        assert_eq!(v.launch(HEADS, v.units(HEADS, 132)), Launch { grid: (49, 8), threads: 128, shared_bytes: 21_840 });
        let v = shape(true).variant(Form::Whole(4));
        assert_eq!(v.name(), "attention_decode_bf16_e128_h8_whole4");
        assert_eq!(v.launch(HEADS, 2), Launch { grid: (8, 8), threads: 256, shared_bytes: 72_272 });
        let grid_y = |head_dim, query, kv| {
            let shape = DecodeShape::select(Half::F16, head_dim, query / kv, true).unwrap();
            shape.variant(Form::Split).grid_y(HeadCounts { query, kv })
        };
        assert_eq!((grid_y(128, 48, 4), grid_y(256, 24, 2)), (4, 4));
        assert!(DecodeShape::select(Half::F16, 112, 4, true).is_none());
        assert_eq!(shape(true).max_slots(HEADS, 132), 528);
        assert_eq!((DecodeVariant::all(true).len(), DecodeVariant::all(false).len()), (46, 34));
        // L1 has room for what 16 warps have on their way, 8 KB each.
        let of = |form| shape(true).variant(form).shared_percent();
        assert_eq!([4, 2, 1].map(|warps| of(Form::SplitDense(warps))), [Some(40), Some(49), Some(40)]);
        assert_eq!(of(Form::Whole(1)), None);
    }
}
