//! Recorded forwards. A step in which every sequence has one token runs the same kernels at the same addresses
//! whenever it has as many tokens (and lengths that ask for the same attention kernels), so it is recorded as a CUDA
//! graph when that comes for the second time, and launched by one call from then on: a kernel then costs half a
//! microsecond to start instead of four. The first time runs as it is, so that memory, plans and modules are there.
//! Decides which steps are recorded; knows no op.

use crate::check::Elem;
use crate::device::Device;
use crate::kernels::decode_forms::DecodeVariant;
use crate::memory::{CudaBuffer, DeviceMemory};
use cudarc::driver::{result, sys};
use pagemill_backend::{BackendError, BatchLayout, DType, Tensor};
use std::collections::HashMap;
use std::sync::Arc;

/// Tokens of a recorded step at most: beyond, launching is no longer what a step waits for.
const MAX_RECORDED_TOKENS: usize = 512;

/// What must be equal for a record to be run again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RecordKey {
    pub(crate) num_tokens: usize,
    /// See `CudaBatch::decode_variants`.
    pub(crate) decode_variants: Vec<Option<DecodeVariant>>,
    /// See `CudaBatch::moves`.
    pub(crate) batch_moves: u64,
}

/// How far a key is.
enum Record {
    /// It came once.
    Seen,
    /// Recorded; hidden size.
    Ready { graph: Graph, cols: usize },
}

/// An instantiated graph.
pub(crate) struct Graph(sys::CUgraphExec);

// SAFETY: a handle that any thread may use; see `Device`.
unsafe impl Send for Graph {}

/// What the caller of a forward does next.
pub(crate) enum Next {
    /// Run the ops; nothing is recorded.
    Run,
    /// Run the ops: they are recorded, and nothing is computed until the end.
    Record,
    /// Nothing: the hidden states of this shape are being computed.
    Done(Tensor),
}

/// The records of one device, for one model and pool.
pub(crate) struct Records {
    device: Arc<Device>,
    records: HashMap<RecordKey, Record>,
    recording: Option<RecordKey>,
    /// Where recorded forwards leave their hidden states.
    output: Option<Arc<DeviceMemory>>,
}

/// Whether every sequence has one token, and there are few enough of them.
pub(crate) fn is_recordable(layout: &BatchLayout) -> bool {
    let tokens = layout.num_tokens();
    (1..=MAX_RECORDED_TOKENS).contains(&tokens)
        && tokens == layout.num_seqs()
        && layout.query_start.windows(2).all(|pair| pair[1] - pair[0] == 1)
}

impl Records {
    /// None.
    pub(crate) fn new(device: &Arc<Device>) -> Self {
        Self { device: Arc::clone(device), records: HashMap::new(), recording: None, output: None }
    }

    /// Whether ops are being recorded now.
    pub(crate) fn is_recording(&self) -> bool {
        self.recording.is_some()
    }

    /// Bytes held for hidden states.
    pub(crate) fn len_bytes(&self) -> usize {
        self.output.as_ref().map_or(0, |output| output.len())
    }

    /// Forgets everything: weights or pool have changed.
    pub(crate) fn clear(&mut self) {
        self.records.clear();
    }

    /// Whether [`Self::run`] would find one.
    pub(crate) fn has(&self, key: &RecordKey) -> bool {
        matches!(self.records.get(key), Some(Record::Ready { .. }))
    }

    /// Launches the record of `key`, if there is one.
    pub(crate) fn run(&self, key: &RecordKey) -> Result<Option<Tensor>, BackendError> {
        let Some(Record::Ready { graph, cols }) = self.records.get(key) else { return Ok(None) };
        self.device.bind()?;
        self.launch(graph)?;
        self.hidden(key.num_tokens, *cols).map(Some)
    }

    /// Launches the record of `key`, or starts one, or neither.
    pub(crate) fn begin(&mut self, key: RecordKey) -> Result<Next, BackendError> {
        self.device.bind()?;
        if let Some(hidden) = self.run(&key)? {
            return Ok(Next::Done(hidden));
        }
        match self.records.get(&key) {
            None => {
                self.records.insert(key, Record::Seen);
                Ok(Next::Run)
            }
            Some(_) => {
                begin(&self.device)?;
                self.recording = Some(key);
                Ok(Next::Record)
            }
        }
    }

    /// Ends a recording whose ops left their result in `hidden` (f32), and runs it.
    pub(crate) fn end(&mut self, hidden: &Tensor, address: u64) -> Result<Tensor, BackendError> {
        let Some(key) = self.recording.clone() else {
            return Err(self.device.broken("no step is being recorded"));
        };
        let (rows, cols) = (hidden.rows(), hidden.cols());
        let bytes = rows * cols * 4;
        let stream = self.device.stream();
        // Longer than any record's, so that it stays where it is.
        if self.output.is_none() {
            let most = MAX_RECORDED_TOKENS * cols * 4;
            self.output = Some(Arc::new(DeviceMemory::take(&self.device, most, "hidden states")?));
        }
        let output = self.output.as_ref().map_or(0, |output| output.address());
        // SAFETY: `address` holds `bytes` bytes, and the output at least as many.
        unsafe { result::memcpy_dtod_async(output, address, bytes, stream) }
            .map_err(|error| self.device.fault("recording a step", error))?;
        let graph = Graph::end(&self.device)?;
        self.launch(&graph)?;
        self.recording = None;
        self.records.insert(key, Record::Ready { graph, cols });
        self.hidden(rows, cols)
    }

    fn launch(&self, graph: &Graph) -> Result<(), BackendError> {
        // SAFETY: the graph's addresses are the workspace's, the batch's, the pool's and the weights', which
        // live as long as the records.
        unsafe { graph.launch(&self.device) }
    }

    fn hidden(&self, rows: usize, cols: usize) -> Result<Tensor, BackendError> {
        let output = self.output.as_ref().ok_or_else(|| self.device.broken("a record without a result"))?;
        let buffer = CudaBuffer::over(Arc::clone(output));
        Ok(Tensor::from_buffer(rows, cols, Elem::F32.dtype(), Box::new(buffer)))
    }
}

impl Graph {
    /// Records what `work` queues on the device's stream; nothing of it runs.
    pub(crate) fn record(
        device: &Device,
        work: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        begin(device)?;
        let queued = work();
        // Ended in any case: the stream must not go on recording.
        let graph = Self::end(device);
        queued.and(graph)
    }

    /// Ends what [`begin`] began.
    fn end(device: &Device) -> Result<Self, BackendError> {
        let fault = |error| device.fault("recording a step", error);
        // SAFETY: capturing was begun on this stream.
        let recorded = unsafe { result::stream::end_capture(device.stream()) }.map_err(fault)?;
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
        // SAFETY: the graph was just captured; the executable form does not need it any more.
        unsafe {
            let graph = result::graph::instantiate(recorded, flags).map_err(fault)?;
            result::graph::destroy(recorded).map_err(fault)?;
            Ok(Self(graph))
        }
    }

    /// Runs it, on the device's stream.
    ///
    /// # Safety
    /// Everything that the recorded ops read and write is still there.
    pub(crate) unsafe fn launch(&self, device: &Device) -> Result<(), BackendError> {
        // SAFETY: this function's contract.
        unsafe { result::graph::launch(self.0, device.stream()) }
            .map_err(|error| device.fault("running a recorded step", error))
    }
}

/// What is queued on the device's stream from now on is recorded.
fn begin(device: &Device) -> Result<(), BackendError> {
    device.bind()?;
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream lives as long as the device.
    unsafe { result::stream::begin_capture(device.stream(), mode) }
        .map_err(|error| device.fault("recording a step", error))
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated once, destroyed once; the driver keeps it until a launch of it is done.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}

/// Hidden states are f32: see the ops contract.
pub(crate) const HIDDEN: DType = DType::F32;

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(counts: &[u32]) -> BatchLayout {
        let mut layout = BatchLayout { query_start: vec![0], ..Default::default() };
        for &count in counts {
            layout.positions.extend(0..count);
            layout.query_start.push(u32::try_from(layout.positions.len()).unwrap_or(0));
            layout.seq_lens.push(count);
        }
        layout
    }

    #[test]
    fn only_pure_decodes_are_recorded() {
        assert!(is_recordable(&layout(&[1])));
        assert!(is_recordable(&layout(&[1; 512])));
        assert!(!is_recordable(&layout(&[])));
        assert!(!is_recordable(&layout(&[1; 513])));
        assert!(!is_recordable(&layout(&[1, 2])));
        assert!(!is_recordable(&layout(&[2, 0])), "as many tokens as sequences, but not one each");
    }
}
