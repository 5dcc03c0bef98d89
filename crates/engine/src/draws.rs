//! The tokens that a step drew, for the next step to begin with: kept by the rank that samples, and told to the
//! ranks beside it. Between threads of one process and of one stage; knows no plan.

use crate::EngineError;
use crate::pipeline::{MAX_MICRO_BATCHES, watch_for};
use crate::worker::Worker;
use crossbeam_channel::{Receiver, Sender, bounded};
use pagemill_scheduler::StepOutput;
use std::sync::Arc;
use std::time::Duration;

/// How long a rank on a device of its own looks for the draws before it sleeps: about as long as a step.
const WATCH_FOR_DRAWS: Duration = Duration::from_millis(20);

/// What a rank knows of the draws of the step before.
#[derive(Default)]
pub(crate) struct Draws {
    tokens: Arc<[u32]>,
    /// Of the rank that samples: those that it tells.
    listeners: Vec<Sender<Arc<[u32]>>>,
    /// Of one beside it.
    told: Option<Told>,
}

struct Told {
    receiver: Receiver<Arc<[u32]>>,
    may_spin: bool,
    /// A step has run whose draws have not been heard.
    is_due: bool,
}

impl Draws {
    /// Waits for the draws of the step before, where others draw.
    ///
    /// # Errors
    /// The rank that samples is gone.
    pub(crate) fn begin_step(&mut self) -> Result<(), EngineError> {
        let Some(told) = self.told.as_mut().filter(|told| told.is_due) else { return Ok(()) };
        told.is_due = false;
        let watched = if told.may_spin { watch_for(&told.receiver, WATCH_FOR_DRAWS) } else { None };
        self.tokens = match watched {
            Some(Ok(tokens)) => tokens,
            _ => told.receiver.recv().map_err(|_| EngineError::Internal("the rank that samples is gone".into()))?,
        };
        Ok(())
    }

    /// Token `idx` of those that the step before drew, if it is known here. Where none could be drawn, 0 stands for
    /// it: nobody hears what follows from it.
    pub(crate) fn token(&self, idx: u32) -> Option<u32> {
        self.tokens.get(idx as usize).copied()
    }

    /// The step is over; `output` is what this rank has of it.
    pub(crate) fn end_step(&mut self, output: &StepOutput) {
        if let Some(told) = &mut self.told {
            told.is_due = true;
            return;
        }
        self.tokens = output.sampled.iter().map(|sampled| *sampled.token.as_ref().unwrap_or(&0)).collect();
        for listener in &self.listeners {
            // One that is gone has failed, which ends the others as well.
            let _ = listener.send(Arc::clone(&self.tokens));
        }
    }
}

/// Lets the one of `workers` that samples tell the others, where all are of one stage.
pub(crate) fn join_draws(workers: &mut [Worker]) {
    if workers.iter().any(|worker| worker.stage().count > 1) {
        return;
    }
    let mut listeners = Vec::new();
    for worker in workers.iter_mut().filter(|worker| !worker.is_output_rank()) {
        let (sender, receiver) = bounded(MAX_MICRO_BATCHES + 1);
        let told = Told { receiver, may_spin: !worker.shares_cores(), is_due: false };
        worker.set_draws(Draws { told: Some(told), ..Draws::default() });
        listeners.push(sender);
    }
    if let Some(worker) = workers.iter_mut().find(|worker| worker.is_output_rank()) {
        worker.set_draws(Draws { listeners, ..Draws::default() });
    }
}
