//! Outcomes on their way: of steps that the host has queued and whose draws it has not taken yet. The draws of the last
//! one go into the step behind it on the device. Knows no request.

use super::tasks::OUTCOME_WORDS;
use crate::device::Device;
use crate::images::Kernels;
use crate::memory::PinnedMemory;
use crate::rows::Function;
use pagemill_backend::{BackendError, MAX_QUEUED_STEPS};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Threads of the one block of `hand_out` and of `begin_step`.
const STEP_THREADS: u32 = 512;
/// Room for draws at first, in bytes: of a large batch.
const FIRST_BYTES: usize = 1 << 14;
/// Words in front of the draws, of which the first is the flag.
const FLAG_WORDS: usize = 16;
/// How often the device is asked whether it has failed, while the host waits for a flag.
const LOOK_FOR_FAULTS: Duration = Duration::from_millis(1);

/// `HandOutArgs` in step.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct HandOutArgs {
    draws: u64,
    to: u64,
    flag: u64,
    num_words: u32,
    serial: u32,
}

/// `BeginStepArgs` in step.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct BeginStepArgs {
    from: u64,
    awaited: u64,
    ids: u64,
    draws: u64,
    num_ids: u32,
    num_awaited: u32,
    draw_words: u32,
}

/// The words of a step, in the host's memory, and where its ids go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepWords {
    /// `[num_ids]`.
    pub(crate) from: u64,
    /// `[num_awaited]` pairs of a place among the ids and a task of the step before.
    pub(crate) awaited: u64,
    /// On the device.
    pub(crate) ids: u64,
    pub(crate) num_ids: usize,
    pub(crate) num_awaited: usize,
    /// The last of the awaited tasks.
    pub(crate) largest_task: Option<u32>,
}

/// What a kernel leaves of each task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// A token and the place of its logit: `largest_f32`.
    Largest,
    /// An `Outcome`: `sample_rows_f32`.
    Outcome,
}

impl Form {
    /// Words a task.
    pub(super) fn words(self) -> usize {
        match self {
            Self::Largest => 2,
            Self::Outcome => OUTCOME_WORDS,
        }
    }
}

/// Draws on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Draws {
    pub(super) address: u64,
    pub(super) form: Form,
    pub(super) num_tasks: usize,
}

/// A step's draws on their way to the host.
struct Slot {
    /// A flag, and the draws.
    pinned: PinnedMemory,
    /// What the flag is when they are there.
    serial: u32,
    form: Form,
    num_tasks: usize,
}

/// Draws on their way, oldest first.
pub(super) struct Queue {
    device: Arc<Device>,
    hand_out: Function,
    begin_step: Function,
    slots: [Slot; MAX_QUEUED_STEPS],
    oldest: usize,
    len: usize,
    /// Of the step queued last.
    last: Option<Draws>,
    serial: u32,
    /// When the device was asked last whether it has failed.
    looked: Instant,
}

impl Queue {
    /// Nothing on its way.
    pub(super) fn new(device: &Arc<Device>, kernels: &Kernels) -> Result<Self, BackendError> {
        let slot = || {
            let pinned = PinnedMemory::take(device, FIRST_BYTES, "draws")?;
            Ok::<_, BackendError>(Slot { pinned, serial: 0, form: Form::Largest, num_tasks: 0 })
        };
        Ok(Self {
            device: Arc::clone(device),
            hand_out: Function(kernels.get("hand_out")?),
            begin_step: Function(kernels.get("begin_step")?),
            slots: [slot()?, slot()?],
            oldest: 0,
            len: 0,
            last: None,
            serial: 0,
            looked: Instant::now(),
        })
    }

    /// Another step can be queued.
    ///
    /// # Errors
    /// So many are on their way already.
    pub(super) fn ensure_room(&self) -> Result<(), BackendError> {
        if self.len == MAX_QUEUED_STEPS {
            return Err(self.device.broken(format!("{MAX_QUEUED_STEPS} steps are queued already")));
        }
        Ok(())
    }

    /// Sends draws on their way to the host.
    ///
    /// # Safety
    /// Kernels of the device's stream leave them where `draws` says; the range is written later in stream order only.
    pub(super) unsafe fn push(&mut self, draws: Draws) -> Result<(), BackendError> {
        self.ensure_room()?;
        let slot = &mut self.slots[(self.oldest + self.len) % MAX_QUEUED_STEPS];
        let num_words = draws.num_tasks * draws.form.words();
        let len = (FLAG_WORDS + num_words) * 4;
        if slot.pinned.len() < len {
            slot.pinned = PinnedMemory::take(&self.device, len.next_power_of_two(), "draws")?;
        }
        self.serial = self.serial.wrapping_add(1);
        (slot.form, slot.num_tasks, slot.serial) = (draws.form, draws.num_tasks, self.serial);
        let args = HandOutArgs {
            draws: draws.address,
            to: slot.pinned.word_address(FLAG_WORDS),
            flag: slot.pinned.word_address(0),
            num_words: u32::try_from(num_words).map_err(|_| self.device.broken("too many draws"))?,
            serial: self.serial,
        };
        // SAFETY: the struct is the kernel's, which reads behind its wait only; the slot has room, and is read only
        // once its flag is set. The rest is this function's contract.
        unsafe { self.device.launch_overlapped(self.hand_out.0, (1, 1), STEP_THREADS, 0, &args) }?;
        self.len += 1;
        self.last = Some(draws);
        Ok(())
    }

    /// Whether the oldest draws are there.
    pub(super) fn is_ready(&mut self) -> Result<bool, BackendError> {
        let slot = self.oldest()?;
        let is_set = || slot.pinned.word(0).load(Ordering::Acquire) == slot.serial;
        if is_set() {
            return Ok(true);
        }
        if self.looked.elapsed() < LOOK_FOR_FAULTS {
            return Ok(false);
        }
        // Nobody sets the flag on a device that has failed.
        if self.device.is_idle()? && !is_set() {
            return Err(self.device.broken("a step has ended without its draws"));
        }
        self.looked = Instant::now();
        Ok(false)
    }

    /// Waits for the oldest draws and hands `read` their words.
    pub(super) fn pop(&mut self, read: impl FnOnce(Form, &[f32])) -> Result<(), BackendError> {
        while !self.is_ready()? {
            std::hint::spin_loop();
        }
        let slot = &mut self.slots[self.oldest];
        self.oldest = (self.oldest + 1) % MAX_QUEUED_STEPS;
        self.len -= 1;
        let num_words = FLAG_WORDS + slot.num_tasks * slot.form.words();
        read(slot.form, &slot.pinned.floats_mut(num_words)[FLAG_WORDS..]);
        Ok(())
    }

    fn oldest(&self) -> Result<&Slot, BackendError> {
        if self.len == 0 {
            return Err(self.device.broken("no step is queued"));
        }
        Ok(&self.slots[self.oldest])
    }

    /// Brings the ids of a step, with draws of the step queued last in their places.
    ///
    /// # Safety
    /// All of `words` is as it says, the host's part until the stream was waited for, and awaited places lie inside
    /// the ids.
    pub(super) unsafe fn begin_step(&self, words: StepWords) -> Result<(), BackendError> {
        let draws = match words.largest_task {
            None => 0,
            Some(task) => {
                let draws = self.last.filter(|draws| (task as usize) < draws.num_tasks);
                draws.ok_or_else(|| self.device.broken(format!("the step queued before has no task {task}")))?.address
            }
        };
        let count = |len| u32::try_from(len).map_err(|_| self.device.broken("too many tokens"));
        let args = BeginStepArgs {
            from: words.from,
            awaited: words.awaited,
            ids: words.ids,
            draws,
            num_ids: count(words.num_ids)?,
            num_awaited: count(words.num_awaited)?,
            draw_words: count(self.last.map_or(0, |draws| draws.form.words()))?,
        };
        // SAFETY: the struct is the kernel's, which reads draws and writes behind its wait only; tasks are inside the
        // draws by the lines above, which nothing has overwritten: the next step's kernels come later on the stream.
        // The rest is this function's contract.
        unsafe { self.device.launch_overlapped(self.begin_step.0, (1, 1), STEP_THREADS, 0, &args) }
    }
}
