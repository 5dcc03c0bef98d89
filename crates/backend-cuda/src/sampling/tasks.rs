//! Sampling by the kernel in `kernels/sampling.cu`: tasks and their lists as words, one upload, one launch, one copy
//! back. Decides which tasks the device takes; knows no request.
//!
//! ```text
//! up    tasks [TASK_WORDS each]  lists of the first task: bias, prompt ids, counts, masked  of the second …
//! down  outcomes [OUTCOME_WORDS each]  likeliest tokens of the first task: (id, logit) …
//! ```

use crate::device::Device;
use crate::images::Kernels;
use crate::memory::DeviceMemory;
use crate::rows::Function;
use crate::staging::{Readback, UploadRing};
use cudarc::driver::{result, sys};
use pagemill_backend::BackendError;
use pagemill_backend::sampling::{Choice, RowOutcome, RowReport, RowTask, UNIT};
use std::sync::{Arc, Mutex, PoisonError};

/// Thread blocks of a team: `TEAM` in sampling_team.cuh.
const TEAM: u32 = 8;
/// Threads of each: `THREADS`.
const THREADS: u32 = 512;
/// Tokens of a group: `GROUP`.
const GROUP: u32 = 128;
/// Groups of a slice at most: `MAX_GROUPS`.
const MAX_GROUPS: u32 = 368;
/// Likeliest tokens of a report at most: `MAX_TOP`.
const MAX_TOP: u32 = 32;
/// Words of a `Task` in sampling.cu.
const TASK_WORDS: usize = 22;
/// Words of an `Outcome`.
pub(super) const OUTCOME_WORDS: usize = 8;
/// `num_top` of a task without a report.
const NO_REPORT: u32 = u32::MAX;
/// Room for tasks, and for outcomes, at first: a large batch with penalties' lists of average length.
const FIRST_BYTES: usize = 1 << 20;

/// `SamplingArgs` in sampling.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct SamplingArgs {
    logits: u64,
    tasks: u64,
    lists: u64,
    outcomes: u64,
    tops: u64,
    cols: u32,
    slice_groups: u32,
}

/// Groups of each slice of a row with so many columns.
fn slice_groups(cols: u32) -> u32 {
    cols.div_ceil(GROUP).div_ceil(TEAM)
}

/// The lower and the upper half of a double's bits.
fn halves(value: f64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = value.to_bits().to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}

/// The tasks of one launch as the kernel takes them.
#[derive(Debug, Default)]
struct Packed {
    /// Tasks, then lists.
    words: Vec<u32>,
    num_tasks: usize,
    num_tops: usize,
}

impl Packed {
    /// Packs tasks over rows with `cols` columns. `None`: more than 32 bits can count.
    fn fill(&mut self, tasks: &[RowTask<'_>], cols: u32) -> Option<()> {
        self.words.clear();
        self.words.resize(tasks.len() * TASK_WORDS, 0);
        (self.num_tasks, self.num_tops) = (tasks.len(), 0);
        for (idx, task) in tasks.iter().enumerate() {
            let num_top = task.num_top.map(|num| num.min(cols));
            let top_at = u32::try_from(self.num_tops).ok()?;
            self.num_tops += num_top.unwrap_or(0) as usize;
            let edits = &task.edits;
            let bias = self.list(edits.bias.iter().flat_map(|&(id, bias)| [id, bias.to_bits()]), 2)?;
            let prompt = self.list(edits.prompt_ids.iter().copied(), 1)?;
            let counts = self.list(edits.output_counts.iter().flat_map(|&(id, count)| [id, count]), 2)?;
            let masked = self.list(edits.masked.iter().copied(), 1)?;
            let (how, token, draw) = match task.choice {
                Choice::Largest => (0, 0, None),
                Choice::Draw(draw) => (1, 0, Some(draw)),
                Choice::Given(token) => (2, token, None),
            };
            let bits = |value: Option<f32>| value.unwrap_or(0.0).to_bits();
            let uniform = halves(draw.map_or(0.0, |draw| draw.uniform));
            let words: [u32; TASK_WORDS] = [
                u32::try_from(task.row).ok()?,
                how,
                token,
                draw.and_then(|draw| draw.top_k).filter(|&k| k < cols).unwrap_or(0),
                bits(draw.map(|draw| draw.inv_temperature)),
                bits(draw.map(|draw| draw.top_p)),
                bits(draw.map(|draw| draw.min_p)),
                edits.repetition_penalty.to_bits(),
                edits.presence_penalty.to_bits(),
                edits.frequency_penalty.to_bits(),
                num_top.unwrap_or(NO_REPORT),
                top_at,
                bias.0,
                bias.1,
                prompt.0,
                prompt.1,
                counts.0,
                counts.1,
                masked.0,
                masked.1,
                uniform[0],
                uniform[1],
            ];
            self.words[idx * TASK_WORDS..(idx + 1) * TASK_WORDS].copy_from_slice(&words);
        }
        Some(())
    }

    /// Appends a list whose entries have `width` words: where it begins, and how many entries it has.
    fn list(&mut self, words: impl Iterator<Item = u32>, width: usize) -> Option<(u32, u32)> {
        let start = self.words.len();
        self.words.extend(words);
        let at = u32::try_from(start - self.num_tasks * TASK_WORDS).ok()?;
        Some((at, u32::try_from((self.words.len() - start) / width).ok()?))
    }

    /// Words that come back.
    fn num_results(&self) -> usize {
        self.num_tasks * OUTCOME_WORDS + self.num_tops * 2
    }

    /// What came back, as outcomes of `tasks`.
    fn read(&self, tasks: &[RowTask<'_>], cols: u32, results: &[f32], outcomes: &mut Vec<Option<RowOutcome>>) {
        let (heads, mut tops) = results.split_at(self.num_tasks * OUTCOME_WORDS);
        for (task, head) in tasks.iter().zip(heads.chunks_exact(OUTCOME_WORDS)) {
            let word = |at: usize| head[at].to_bits();
            let report = task.num_top.map(|num| {
                let of_task;
                (of_task, tops) = tops.split_at(num.min(cols) as usize * 2);
                let sum = u64::from(word(6)) << 32 | u64::from(word(5));
                RowReport {
                    log_sum: f64::from(head[4]) + (sum as f64 * UNIT).ln(),
                    logit: head[3],
                    rank: word(2),
                    top: of_task.chunks_exact(2).map(|top| (top[0].to_bits(), top[1])).collect(),
                }
            });
            outcomes.push((word(0) != 0).then(|| RowOutcome { token: word(1), report }));
        }
    }
}

/// The sampler of one device.
pub(super) struct TaskSampler {
    device: Arc<Device>,
    /// `None` on chips without clusters.
    function: Option<Function>,
    state: Mutex<State>,
}

struct State {
    packed: Packed,
    ring: UploadRing,
    tasks: DeviceMemory,
    results: DeviceMemory,
    readback: Readback,
}

impl TaskSampler {
    /// Looks the kernel up and takes memory for a large batch.
    pub(super) fn new(device: &Arc<Device>, kernels: &Kernels) -> Result<Self, BackendError> {
        let state = State {
            packed: Packed::default(),
            ring: UploadRing::new(device, kernels)?,
            tasks: DeviceMemory::take(device, FIRST_BYTES, "sampling")?,
            results: DeviceMemory::take(device, FIRST_BYTES, "sampling")?,
            readback: Readback::new(device),
        };
        let function = if device.capability().0 < 9 { None } else { Some(team_function(device, kernels)?) };
        Ok(Self { device: Arc::clone(device), function, state: Mutex::new(state) })
    }

    /// Bytes held.
    pub(super) fn len_bytes(&self) -> usize {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.tasks.len() + state.results.len()
    }

    /// Whether it samples rows of so many columns.
    pub(super) fn takes_cols(&self, cols: u32) -> bool {
        self.function.is_some() && slice_groups(cols) <= MAX_GROUPS
    }

    /// Runs the tasks over logits `[R, cols]`, whose rows the caller has checked. False: not taken.
    pub(super) fn run(
        &self,
        logits: u64,
        cols: u32,
        tasks: &[RowTask<'_>],
        outcomes: &mut Vec<Option<RowOutcome>>,
    ) -> Result<bool, BackendError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(address) = self.launch(&mut state, logits, cols, tasks)? else { return Ok(false) };
        let State { packed, readback, .. } = &mut *state;
        // SAFETY: all of it belongs to this launch; what the kernel leaves out is not looked at.
        let results = unsafe { readback.read(address, packed.num_results()) }?;
        packed.read(tasks, cols, results, outcomes);
        Ok(true)
    }

    /// Queues the tasks, none with a report, as [`Self::run`] does; gives the address of their outcomes. `None`: not taken.
    pub(super) fn queue(&self, logits: u64, cols: u32, tasks: &[RowTask<'_>]) -> Result<Option<u64>, BackendError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.launch(&mut state, logits, cols, tasks)
    }

    fn launch(
        &self,
        state: &mut State,
        logits: u64,
        cols: u32,
        tasks: &[RowTask<'_>],
    ) -> Result<Option<u64>, BackendError> {
        let Some(function) = self.function else { return Ok(None) };
        let groups = slice_groups(cols);
        let is_taken = |task: &RowTask<'_>| task.num_top.is_none_or(|num| num <= MAX_TOP);
        if groups > MAX_GROUPS || !tasks.iter().all(is_taken) {
            return Ok(None);
        }
        let State { packed, ring, tasks: up, results: down, .. } = state;
        packed.fill(tasks, cols).ok_or_else(|| self.device.broken("more sampling tasks than fit 32 bits"))?;
        make_room(&self.device, up, packed.words.len() * 4)?;
        make_room(&self.device, down, packed.num_results() * 4)?;
        // SAFETY: the range has room for the words; what reads it now is before this on the stream.
        unsafe { ring.upload(&[&packed.words], up.address()) }?;
        let args = SamplingArgs {
            logits,
            tasks: up.address(),
            lists: up.address() + (tasks.len() * TASK_WORDS * 4) as u64,
            outcomes: down.address(),
            tops: down.address() + (tasks.len() * OUTCOME_WORDS * 4) as u64,
            cols,
            slice_groups: groups,
        };
        let num_tasks = u32::try_from(tasks.len()).map_err(|_| self.device.broken("too many sampling tasks"))?;
        let shared_bytes = groups * GROUP * 4;
        // SAFETY: the struct is the kernel's; the caller checked the rows, `fill` placed every list inside the upload,
        // and `down` has room for all outcomes. A team's slices cover the row.
        unsafe { self.device.launch_cluster(function.0, (TEAM, num_tasks), TEAM, THREADS, shared_bytes, &args) }?;
        Ok(Some(down.address()))
    }
}

/// The outcome of a task without a report, from its words.
pub(super) fn bare_outcome(head: &[f32]) -> Option<RowOutcome> {
    (head[0].to_bits() != 0).then(|| RowOutcome { token: head[1].to_bits(), report: None })
}

/// Exchanges `memory` for more if it has not `len` bytes. Nothing queued uses it afterwards: freeing waits.
pub(super) fn make_room(device: &Arc<Device>, memory: &mut DeviceMemory, len: usize) -> Result<(), BackendError> {
    if memory.len() < len {
        *memory = DeviceMemory::take(device, len.next_power_of_two().max(16), "sampling")?;
    }
    Ok(())
}
/// The kernel, allowed the shared memory of the largest slice.
fn team_function(device: &Device, kernels: &Kernels) -> Result<Function, BackendError> {
    let function = kernels.get("sample_rows_f32")?;
    device.bind()?;
    use sys::CUfunction_attribute as Attribute;
    let largest = (MAX_GROUPS * GROUP * 4).cast_signed();
    for (attribute, value) in [
        (Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, largest),
        // In per cent: two thread blocks fit beside each other.
        (Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
    ] {
        // SAFETY: a function of a loaded module.
        unsafe { result::function::set_function_attribute(function, attribute, value) }
            .map_err(|error| device.fault("giving the sampler shared memory", error))?;
    }
    Ok(Function(function))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use pagemill_backend::sampling::{Draw, LogitEdits};

    #[test]
    fn slices_cover_every_row() {
        for cols in [1, 7, 128, 129, 1024, 1025, 32_000, 128_256, 262_144] {
            let groups = slice_groups(cols);
            assert!(groups * TEAM * GROUP >= cols && (groups - 1) * TEAM * GROUP < cols, "{cols}");
            assert!(groups <= MAX_GROUPS, "{cols}");
        }
    }

    #[test]
    fn lists_lie_behind_all_tasks() {
        let (bias, counts) = ([(4, 0.5)], [(9, 2), (11, 1)]);
        let edits = LogitEdits { bias: &bias, prompt_ids: &[1, 2, 3], output_counts: &counts, ..LogitEdits::default() };
        let draw = Draw { inv_temperature: 0.5, top_k: Some(50), top_p: 0.9, min_p: 0.1, uniform: 0.25 };
        let plain = RowTask { row: 0, choice: Choice::Largest, edits: LogitEdits::default(), num_top: Some(20) };
        let tasks = [plain, RowTask { row: 1, choice: Choice::Draw(draw), edits, num_top: None }, plain];
        let mut packed = Packed::default();
        packed.fill(&tasks, 40).unwrap();
        let (of_tasks, lists) = packed.words.split_at(3 * TASK_WORDS);
        assert_eq!(lists, [4, 0.5_f32.to_bits(), 1, 2, 3, 9, 2, 11, 1]);
        let second = &of_tasks[TASK_WORDS..2 * TASK_WORDS];
        assert_eq!(second[3], 0, "50 of 40 are all");
        assert_eq!(second[10..20], [NO_REPORT, 20, 0, 1, 2, 3, 5, 2, 9, 0]);
        assert_eq!(second[20..], halves(0.25));
        assert_eq!(halves(f64::from_bits(0x0123_4567_89ab_cdef)), [0x89ab_cdef, 0x0123_4567]);
        assert_eq!(packed.num_results(), 3 * OUTCOME_WORDS + 2 * 40);
    }

    #[test]
    fn outcomes_are_read_in_the_order_of_tasks() {
        let task = |num_top| RowTask { row: 0, choice: Choice::Largest, edits: LogitEdits::default(), num_top };
        let tasks = [task(Some(2)), task(None), task(Some(5)), task(None)];
        let mut packed = Packed::default();
        packed.fill(&tasks, 3).unwrap();
        let words = |words: [u32; OUTCOME_WORDS]| words.map(f32::from_bits);
        let mut results = Vec::new();
        results.extend(words([1, 7, 2, 0.5_f32.to_bits(), 1.5_f32.to_bits(), 0, 1 << 12, 9]));
        results.extend(words([1, 8, 9, 9, 9, 9, 9, 9]));
        results.extend(words([0, 9, 9, 9, 9, 9, 9, 9]));
        results.extend(words([1, 6, 9, 9, 9, 9, 9, 9]));
        results.extend([f32::from_bits(1), 1.5, f32::from_bits(7), 0.5]);
        results.extend([9.0; 6]);
        assert_eq!(results.len(), packed.num_results());
        let mut outcomes = Vec::new();
        packed.read(&tasks, 3, &results, &mut outcomes);
        let report = RowReport { log_sum: 1.5, logit: 0.5, rank: 2, top: vec![(1, 1.5), (7, 0.5)] };
        let want = [
            Some(RowOutcome { token: 7, report: Some(report) }),
            Some(RowOutcome { token: 8, report: None }),
            None,
            Some(RowOutcome { token: 6, report: None }),
        ];
        assert_eq!(outcomes, want);
    }
}
