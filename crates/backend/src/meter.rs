//! How a device times its own work, for benches: by its own clock, without what the host adds. Only devices whose
//! ops go on after they have returned need it; where they do not, the host's clock serves.

use crate::BackendError;
use std::time::Duration;

/// How a pass of ops gets to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launching {
    /// Recorded once and launched as a whole, as a decode step is. Only ops that upload nothing.
    Recorded,
    /// Op by op, queued while the device is kept busy, so that it never waits for the host.
    Queued,
}

/// A device's clock.
pub trait DeviceMeter {
    /// Runs `work` once, so that its buffers and plans are there, then `passes` times more: the device's own time of
    /// each. `work` queues ops and reads nothing back; results of a pass need not be right, as a recorded pass
    /// repeats its first.
    ///
    /// # Errors
    /// What `work` gives; the device failed.
    fn time(
        &self,
        launching: Launching,
        passes: usize,
        work: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Vec<Duration>, BackendError>;

    /// Bytes a second at which the device reads `num_bytes` of its memory, best of a few passes. Allocates them.
    ///
    /// # Errors
    /// No room for them; the device failed.
    fn read_bytes_per_second(&self, num_bytes: usize) -> Result<f64, BackendError>;
}
