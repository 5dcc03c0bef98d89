//! A device that takes 2 ms for every step and computes nothing: it checks what is uploaded and copies it once, as a
//! device of its own memory does, and draws one token for everybody.

use pagemill_backend::sampling::{RowOutcome, RowTask};
use pagemill_backend::{
    Activation, AttentionParams, Backend, BackendError, BatchLayout, BlockCopy, CheckedLayout, CpuBackend, CpuConfig,
    DeviceBatch, DeviceBuffer, DeviceInfo, KvPool, KvPoolSpec, LinearPart, ReadRows, RopeTable, Tensor, Weight,
    WeightDesc,
};
use std::any::Any;
use std::hint::black_box;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

const STEP: Duration = Duration::from_millis(2);

pub struct FreeDevice {
    /// Holds what must exist.
    host: CpuBackend,
    /// Where uploads go.
    pinned: Mutex<Vec<u32>>,
}

impl FreeDevice {
    pub fn new() -> Self {
        let config = CpuConfig { num_threads: Some(1), ..CpuConfig::default() };
        Self { host: CpuBackend::new(config).unwrap(), pinned: Mutex::default() }
    }

    fn copy(&self, words: &[&[u32]]) {
        let mut pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        pinned.clear();
        words.iter().for_each(|words| pinned.extend_from_slice(words));
        black_box(&*pinned);
    }
}

type Done = Result<(), BackendError>;

impl Backend for FreeDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { shares_memory: false, ..self.host.info() }
    }

    fn load_weight(&self, desc: WeightDesc, read: &mut ReadRows<'_>) -> Result<Weight, BackendError> {
        self.host.load_weight(desc, read)
    }

    fn load_vector(&self, name: &str, data: &[f32]) -> Result<Tensor, BackendError> {
        self.host.load_vector(name, data)
    }

    fn temp(&self, rows: usize, cols: usize) -> Result<Tensor, BackendError> {
        self.host.temp(rows, cols)
    }

    fn logits_rows(&self) -> usize {
        1024
    }

    fn workspace(&self) -> (usize, u64) {
        self.host.workspace()
    }

    fn alloc_kv(&self, spec: &KvPoolSpec) -> Result<KvPool, BackendError> {
        let layers = (0..spec.layers_per_group).map(|_| Box::new(NoBytes) as _);
        Ok(KvPool::from_buffers(spec.clone(), layers.collect()))
    }

    fn copy_blocks(&self, _kv: &mut KvPool, _copies: &[BlockCopy]) -> Done {
        Ok(())
    }

    fn upload_batch(&self, layout: BatchLayout, kv: &KvPoolSpec) -> Result<DeviceBatch, BackendError> {
        self.upload_checked(CheckedLayout::new(layout, kv)?, kv)
    }

    fn upload_checked(&self, layout: CheckedLayout, kv: &KvPoolSpec) -> Result<DeviceBatch, BackendError> {
        let layout = layout.into_layout_for(kv)?;
        let group = &layout.groups[0];
        self.copy(&[&layout.positions, &group.slot_mapping, &group.block_table_start, &group.block_table]);
        Ok(DeviceBatch { layout, device: None })
    }

    fn begin_forward(&self) {}

    fn end_forward(&self) {}

    fn replay(&self, ids: &[u32], _batch: &DeviceBatch) -> Result<Option<Tensor>, BackendError> {
        self.copy(&[ids]);
        Ok(Some(self.host.temp(ids.len(), 128)?))
    }

    fn embed(&self, _table: &Weight, _ids: &[u32], _scale: f32, _out: &mut Tensor) -> Done {
        Ok(())
    }

    fn rms_norm(&self, _x: &Tensor, _weight: &Tensor, _eps: f32, _out: &mut Tensor) -> Done {
        Ok(())
    }

    fn add_rms_norm(&self, _: &mut Tensor, _x: &Tensor, _weight: &Tensor, _eps: f32, _out: &mut Tensor) -> Done {
        Ok(())
    }

    fn add(&self, _residual: &mut Tensor, _x: &Tensor) -> Done {
        Ok(())
    }

    fn linear(&self, _x: &Tensor, _parts: &mut [LinearPart<'_>]) -> Done {
        Ok(())
    }

    fn rope(&self, _x: &mut Tensor, _head_dim: usize, _table: &RopeTable, _batch: &DeviceBatch) -> Done {
        Ok(())
    }

    fn kv_write(
        &self,
        _k: &Tensor,
        _v: &Tensor,
        _params: &AttentionParams,
        _batch: &DeviceBatch,
        _kv: &mut KvPool,
    ) -> Done {
        Ok(())
    }

    fn attention(
        &self,
        _q: &Tensor,
        _params: &AttentionParams,
        _batch: &DeviceBatch,
        _kv: &KvPool,
        _out: &mut Tensor,
    ) -> Done {
        Ok(())
    }

    fn gated_activation(&self, _gate: &Tensor, _up: &Tensor, _act: Activation, _out: &mut Tensor) -> Done {
        Ok(())
    }

    fn gather_rows(&self, _x: &Tensor, _rows: &[u32], _out: &mut Tensor) -> Done {
        Ok(())
    }

    fn scale(&self, _x: &mut Tensor, _scale: f32) -> Done {
        Ok(())
    }

    fn soft_cap(&self, _x: &mut Tensor, _cap: f32) -> Done {
        Ok(())
    }

    fn sample_rows(
        &self,
        _logits: &Tensor,
        tasks: &[RowTask<'_>],
        outcomes: &mut Vec<Option<RowOutcome>>,
    ) -> Result<bool, BackendError> {
        std::thread::sleep(STEP);
        outcomes.clear();
        outcomes.extend(tasks.iter().map(|_| Some(RowOutcome { token: 7, report: None })));
        Ok(true)
    }

    fn to_host(&self, x: &Tensor, out: &mut [f32]) -> Done {
        self.host.to_host(x, out)
    }

    fn for_each_row(&self, x: &mut Tensor, visit: &(dyn Fn(usize, &mut [f32]) + Sync)) -> Done {
        self.host.for_each_row(x, visit)
    }

    fn copy_from_host(&self, data: &[f32], x: &mut Tensor) -> Done {
        self.host.copy_from_host(data, x)
    }
}

/// Memory of a pool that nobody reads.
struct NoBytes;

impl DeviceBuffer for NoBytes {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn len_bytes(&self) -> usize {
        0
    }
}
