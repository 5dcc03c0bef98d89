//! The step's layout on the device: one upload into one range. Everything whose size follows from the numbers of
//! tokens and sequences lies in front, so that equal numbers give equal addresses and recorded forwards can be
//! run again; prompts' work and block tables lie behind. Knows no kernel, but keeps a plan for each kind of
//! attention layer that it has met (`kernels/attention_plan.rs`) and uploads it along.
//!
//! ```text
//! words  positions [T]  token_seq [T]  { slots [T]  table_start [S + 1] } per group
//!        decode words per kind  prefill words per kind  block tables of all groups
//! ```
//! `table_start` counts from the first table of the first group.

use crate::device::Device;
use crate::images::Kernels;
use crate::kernels::attention_plan::{LayerKind, LayerPlan, PlanPlace};
use crate::kernels::decode_forms::DecodeVariant;
use crate::memory::DeviceMemory;
use crate::staging::UploadRing;
use pagemill_backend::check::{ensure, shape_error};
use pagemill_backend::{AwaitedToken, BackendError, BatchLayout, DeviceBatch, DeviceBuffer};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

/// Room for the layout at first: block tables of 4 million blocks.
const BATCH_BYTES: usize = 16 << 20;
/// Room for ids or row numbers: the most tokens that a step may have.
pub(crate) const MAX_TOKENS: usize = 1 << 20;

/// Where the step's metadata goes.
pub(crate) struct BatchMemory {
    device: Arc<Device>,
    layout: Arc<DeviceMemory>,
    ids: DeviceMemory,
    ring: UploadRing,
    /// How often `layout` has moved.
    moves: u64,
    /// Batches so far.
    serial: u64,
    token_seq: Vec<u32>,
    pairs: Vec<u32>,
    table_starts: Vec<Vec<u32>>,
    /// One for each kind of attention layer that has run over this pool: as many as the model has.
    plans: Vec<LayerPlan>,
}

/// A group's part of the device's copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupPlace {
    /// `[T]`.
    pub(crate) slots: u64,
    /// `[S + 1]`, into `tables`.
    pub(crate) table_start: u64,
}

/// The device's copy of a layout: all that any attention kernel reads of a batch.
pub(crate) struct CudaBatch {
    memory: Arc<DeviceMemory>,
    /// `[T]`.
    pub(crate) positions: u64,
    /// `[T]` which sequence a token belongs to.
    pub(crate) token_seq: u64,
    /// Block ids.
    pub(crate) tables: u64,
    /// One for each cache group.
    pub(crate) groups: Vec<GroupPlace>,
    /// The longest sequence, in tokens.
    pub(crate) max_seq_len: u32,
    /// Different for every batch.
    pub(crate) serial: u64,
    /// Changes whenever the addresses above do, for equal numbers of tokens and sequences.
    pub(crate) moves: u64,
    /// The decode kernel of each plan that was there when the batch was uploaded.
    pub(crate) decode_variants: Vec<Option<DecodeVariant>>,
    /// (group, window) whose tables are known to hold every block in sight.
    covered: Mutex<Vec<(usize, Option<usize>)>>,
    /// Plans for kinds of attention layers, with their memory where they came after the upload.
    plans: Mutex<Vec<(PlanPlace, Option<DeviceMemory>)>>,
}

impl CudaBatch {
    /// The plan for a kind of layers, if the batch has one.
    pub(crate) fn plan(&self, kind: &LayerKind) -> Option<PlanPlace> {
        let plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        plans.iter().map(|(place, _)| *place).find(|place| place.kind == *kind)
    }
}

impl DeviceBuffer for CudaBatch {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn len_bytes(&self) -> usize {
        self.memory.len()
    }
}

impl BatchMemory {
    /// Takes the ranges.
    pub(crate) fn new(device: &Arc<Device>, kernels: &Kernels) -> Result<Self, BackendError> {
        Ok(Self {
            device: Arc::clone(device),
            layout: Arc::new(DeviceMemory::take(device, BATCH_BYTES, "batches")?),
            ids: DeviceMemory::take(device, MAX_TOKENS * 4, "token ids")?,
            ring: UploadRing::new(device, kernels)?,
            moves: 0,
            serial: 0,
            token_seq: Vec::new(),
            pairs: Vec::new(),
            table_starts: Vec::new(),
            plans: Vec::new(),
        })
    }

    /// Bytes held.
    pub(crate) fn len_bytes(&self) -> usize {
        self.layout.len() + self.ids.len()
    }

    /// Uploads a layout that was checked.
    pub(crate) fn upload(&mut self, layout: &BatchLayout) -> Result<CudaBatch, BackendError> {
        self.derive(layout);
        self.serial += 1;
        for plan in &mut self.plans {
            match self.table_starts.get(plan.kind().group_idx) {
                Some(starts) => plan.make(layout, starts),
                None => plan.clear(),
            }
        }
        let mut parts: Vec<&[u32]> = vec![&layout.positions, &self.token_seq];
        for (group, starts) in layout.groups.iter().zip(&self.table_starts) {
            parts.extend([group.slot_mapping.as_slice(), starts]);
        }
        parts.extend(self.plans.iter().map(LayerPlan::decode_words));
        parts.extend(self.plans.iter().map(LayerPlan::prefill_words));
        let num_placed = parts.len();
        parts.extend(layout.groups.iter().map(|group| group.block_table.as_slice()));
        let len = parts.iter().map(|part| part.len() * 4).sum::<usize>();
        if len.next_multiple_of(16) > self.layout.len() {
            let grown = DeviceMemory::take(&self.device, len.next_power_of_two().max(16), "batches")?;
            self.layout = Arc::new(grown);
            self.moves += 1;
        }
        let mut address = self.layout.address();
        // SAFETY: the range is long enough, whole packs and all, and used on this stream only.
        unsafe { self.ring.upload(&parts, address) }?;
        let mut places = parts[..num_placed].iter().map(|part| {
            let place = address;
            address += part.len() as u64 * 4;
            place
        });
        let mut place = || places.next().unwrap_or(0);
        let (positions, token_seq) = (place(), place());
        let groups = layout.groups.iter().map(|_| GroupPlace { slots: place(), table_start: place() }).collect();
        let decode_words: Vec<u64> = self.plans.iter().map(|_| place()).collect();
        let plans = self.plans.iter().zip(decode_words).map(|(plan, decode)| (plan.place(decode, place()), None));
        let plans = Mutex::new(plans.collect());
        Ok(CudaBatch {
            memory: Arc::clone(&self.layout),
            positions,
            token_seq,
            tables: address,
            groups,
            max_seq_len: layout.seq_lens.iter().copied().max().unwrap_or(0),
            serial: self.serial,
            moves: self.moves,
            decode_variants: self.plans.iter().map(LayerPlan::decode_variant).collect(),
            covered: Mutex::default(),
            plans,
        })
    }

    /// Plans for a kind of layers that is met for the first time, for this batch and all that follow.
    pub(crate) fn add_plan(
        &mut self,
        kind: LayerKind,
        layout: &BatchLayout,
        batch: &CudaBatch,
    ) -> Result<PlanPlace, BackendError> {
        self.derive(layout);
        let at = match self.plans.iter().position(|plan| *plan.kind() == kind) {
            Some(at) => at,
            None => {
                let num_sms = u32::try_from(self.device.num_multiprocessors()).unwrap_or(1);
                self.plans.push(LayerPlan::new(kind, num_sms));
                // Later batches have the plan among what lies in front.
                self.moves += 1;
                self.plans.len() - 1
            }
        };
        let plan = &mut self.plans[at];
        plan.make(layout, &self.table_starts[kind.group_idx]);
        let parts = [plan.decode_words(), plan.prefill_words()];
        let len = parts.iter().map(|part| part.len() * 4).sum::<usize>();
        let memory = DeviceMemory::take(&self.device, len.next_multiple_of(16), "a plan for attention")?;
        // SAFETY: the range is long enough and was just taken.
        unsafe { self.ring.upload(&parts, memory.address()) }?;
        let place = plan.place(memory.address(), memory.address() + plan.decode_words().len() as u64 * 4);
        batch.plans.lock().unwrap_or_else(PoisonError::into_inner).push((place, Some(memory)));
        Ok(place)
    }

    /// Forgets the kinds of layers: another pool is coming.
    pub(crate) fn forget_plans(&mut self) {
        self.plans.clear();
        self.moves += 1;
    }

    /// Fills `token_seq` and `table_starts`.
    fn derive(&mut self, layout: &BatchLayout) {
        self.token_seq.clear();
        for (seq, tokens) in (0u32..).zip(layout.query_start.windows(2)) {
            self.token_seq.extend((tokens[0]..tokens[1]).map(|_| seq));
        }
        self.table_starts.resize_with(layout.groups.len(), Vec::new);
        let mut before = 0;
        for (starts, group) in self.table_starts.iter_mut().zip(&layout.groups) {
            starts.clear();
            starts.extend(group.block_table_start.iter().map(|start| start + before));
            before += group.block_table_start.last().copied().unwrap_or(0);
        }
    }

    /// Uploads ids, or row numbers; the last ones are overwritten. Gives their address.
    pub(crate) fn upload_ids(&mut self, op: &'static str, ids: &[u32]) -> Result<u64, BackendError> {
        ensure(op, ids.len() <= MAX_TOKENS, || (format!("at most {MAX_TOKENS} rows"), ids.len().to_string()))?;
        // SAFETY: the range holds MAX_TOKENS words and is used on this stream only.
        unsafe { self.ring.upload(&[ids], self.ids.address()) }?;
        Ok(self.ids.address())
    }

    /// Leaves ids, and pairs of a token among them and a task that draws it, where the kernels that bring them find
    /// both; gives their addresses in the host's memory.
    pub(crate) fn stage_awaiting(
        &mut self,
        op: &'static str,
        ids: &[u32],
        awaited: &[AwaitedToken],
    ) -> Result<(u64, u64), BackendError> {
        ensure(op, ids.len() <= MAX_TOKENS, || (format!("at most {MAX_TOKENS} ids"), ids.len().to_string()))?;
        self.pairs.clear();
        self.pairs.extend(awaited.iter().flat_map(|awaited| [awaited.token, awaited.task]));
        // Pairs first: they are read in words of eight bytes.
        let pairs = self.ring.stage(&[&self.pairs, ids])?;
        Ok((pairs + self.pairs.len() as u64 * 4, pairs))
    }

    /// Where the last ids lie.
    pub(crate) fn ids_address(&self) -> u64 {
        self.ids.address()
    }
}

/// The device's copy of a batch.
pub(crate) fn device_batch<'a>(op: &'static str, batch: &'a DeviceBatch) -> Result<&'a CudaBatch, BackendError> {
    batch
        .device
        .as_ref()
        .and_then(|device| device.as_any().downcast_ref())
        .ok_or_else(|| shape_error(op, "a batch uploaded to the cuda device", "one of another device"))
}

/// Every position that a query token sees has a block. Looked up once for each group and window of a batch.
pub(crate) fn ensure_covered(
    op: &'static str,
    batch: &DeviceBatch,
    group_idx: usize,
    window: Option<usize>,
    block_size: usize,
) -> Result<(), BackendError> {
    let device = device_batch(op, batch)?;
    let mut covered = device.covered.lock().unwrap_or_else(PoisonError::into_inner);
    if covered.contains(&(group_idx, window)) {
        return Ok(());
    }
    let (layout, group) = (&batch.layout, &batch.layout.groups[group_idx]);
    for seq in 0..layout.num_seqs() {
        let num_tokens = (layout.query_start[seq + 1] - layout.query_start[seq]) as usize;
        let end = layout.seq_lens[seq] as usize;
        if num_tokens == 0 {
            continue;
        }
        let first_query = end - num_tokens;
        let begin = window.map_or(0, |window| (first_query + 1).saturating_sub(window));
        let table = &group.block_table[group.block_table_start[seq] as usize..];
        let in_sight = &table[begin / block_size..end.div_ceil(block_size)];
        ensure(op, !in_sight.contains(&u32::MAX), || {
            ("a block for each position in sight".into(), format!("sequence {seq} lacks one"))
        })?;
    }
    covered.push((group_idx, window));
    Ok(())
}
