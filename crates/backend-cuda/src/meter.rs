//! Times ops by the device's own events, and measures how fast it reads. Decides how launches reach the device
//! without the host being timed; knows no op. Only benches come here: kernels are looked up when they do.

use crate::backend::CudaBackend;
use crate::device::Device;
use crate::graphs::Graph;
use crate::memory::DeviceMemory;
use cudarc::driver::{result, sys};
use pagemill_backend::{BackendError, DeviceMeter, Launching};
use std::time::{Duration, Instant};

/// Passes over memory of which the fastest counts.
const READING_PASSES: usize = 10;
/// `READ_THREADS` in ceilings.cu.
const READ_THREADS: u32 = 256;
/// Thread blocks of `read_memory` on each multiprocessor.
const READ_BLOCKS: usize = 4;
/// What the device is kept busy for beyond the host's own time of queueing a pass.
const QUEUEING_SLACK: Duration = Duration::from_micros(100);
/// And at most: a pass that takes the host longer is not worth hiding.
const QUEUEING_MAX: Duration = Duration::from_millis(100);

/// `ReadArgs` in ceilings.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct ReadArgs {
    x: u64,
    out: u64,
    count: u64,
}

/// `WaitArgs` in ceilings.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct WaitArgs {
    nanoseconds: u64,
}

impl DeviceMeter for CudaBackend {
    fn time(
        &self,
        launching: Launching,
        passes: usize,
        work: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Vec<Duration>, BackendError> {
        let device = self.device();
        let queueing = Instant::now();
        work()?;
        let host_time = queueing.elapsed();
        device.synchronize()?;
        match launching {
            Launching::Recorded => {
                let graph = Graph::record(device, work)?;
                // SAFETY: what `work` uses lives as long as its borrow, and temporaries are never freed.
                let mut launch = || unsafe { graph.launch(device) };
                // The first launch also brings the graph to the device.
                launch()?;
                self.time_behind(QUEUEING_SLACK, passes, &mut launch)
            }
            Launching::Queued => {
                let busy = host_time + host_time / 2 + QUEUEING_SLACK;
                self.time_behind(busy.min(QUEUEING_MAX), passes, work)
            }
        }
    }

    fn read_bytes_per_second(&self, num_bytes: usize) -> Result<f64, BackendError> {
        let device = self.device();
        let memory = DeviceMemory::zeroed(device, num_bytes, "measuring how fast memory is read")?;
        let out = DeviceMemory::zeroed(device, size_of::<u32>(), "measuring how fast memory is read")?;
        let count = num_bytes / 16;
        let args = ReadArgs { x: memory.address(), out: out.address(), count: count as u64 };
        let read = self.kernels().get("read_memory")?;
        let blocks = u32::try_from(device.num_multiprocessors() * READ_BLOCKS).unwrap_or(u32::MAX);
        // SAFETY: the struct is the kernel's; `count` words of 16 bytes lie inside the memory, and `out` is one word.
        let mut pass = || unsafe { device.launch(read, (blocks, 1), READ_THREADS, 0, &args) };
        let times = self.time(Launching::Queued, READING_PASSES, &mut pass)?;
        let fastest = times.into_iter().min().unwrap_or_default();
        #[allow(clippy::cast_precision_loss)] // sizes
        Ok((count * 16) as f64 / fastest.as_secs_f64())
    }
}

impl CudaBackend {
    /// The device's time of each of `passes` runs of `work`, queued while the device is kept busy for `busy`.
    fn time_behind(
        &self,
        busy: Duration,
        passes: usize,
        work: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Vec<Duration>, BackendError> {
        let device = self.device();
        let wait = self.kernels().get("wait_a_while")?;
        let args = WaitArgs { nanoseconds: u64::try_from(busy.as_nanos()).unwrap_or(u64::MAX) };
        let (begun, ended) = (Event::new(device)?, Event::new(device)?);
        let mut times = Vec::with_capacity(passes);
        for _ in 0..passes {
            // SAFETY: the struct is the kernel's; it touches no memory.
            unsafe { device.launch(wait, (1, 1), 1, 0, &args) }?;
            begun.record()?;
            work()?;
            ended.record()?;
            times.push(begun.until(&ended)?);
        }
        Ok(times)
    }
}

/// A point in the device's stream that has a time.
struct Event<'a> {
    device: &'a Device,
    handle: sys::CUevent,
}

impl<'a> Event<'a> {
    fn new(device: &'a Device) -> Result<Self, BackendError> {
        device.bind()?;
        let handle = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(|error| device.fault("creating an event", error))?;
        Ok(Self { device, handle })
    }

    fn record(&self) -> Result<(), BackendError> {
        self.device.bind()?;
        // SAFETY: event and stream live as long as `self`.
        unsafe { result::event::record(self.handle, self.device.stream()) }
            .map_err(|error| self.device.fault("recording an event", error))
    }

    /// The time from this event to a later one, which is waited for.
    fn until(&self, later: &Self) -> Result<Duration, BackendError> {
        let fault = |error| self.device.fault("timing a pass", error);
        self.device.bind()?;
        // SAFETY: both events live and were recorded on one stream.
        let ms = unsafe {
            result::event::synchronize(later.handle).map_err(fault)?;
            result::event::elapsed(self.handle, later.handle).map_err(fault)?
        };
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made in `new`, destroyed once; the driver keeps it until it is done.
            let _ = unsafe { result::event::destroy(self.handle) };
        }
    }
}
