//! From a checkpoint's tensors to the device: names, shapes, cuts, and the account of what was read.
//! Decides that every tensor is present, has the shape its layer needs, and is read by some layer.
//! Knows no architecture.

use crate::config::Dialect;
use crate::holdings::Holdings;
use crate::made_up::MadeUp;
use crate::names::Spelling;
use crate::shard::{Shard, ShardError};
use crate::{LoadProgress, ModelError, RankContext};
use pagemill_backend::{DType, Tensor, Weight, WeightDesc};
use pagemill_formats::{TensorInfo, TensorType, Weights};
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::ops::Range;

/// A tensor's type as the device names it: the only place where the two rooms' types meet.
#[must_use]
pub(crate) fn dtype_of(tensor_type: TensorType) -> DType {
    match tensor_type {
        TensorType::F32 => DType::F32,
        TensorType::F16 => DType::F16,
        TensorType::BF16 => DType::BF16,
        TensorType::Q4_0 => DType::Q4_0,
        TensorType::Q4_1 => DType::Q4_1,
        TensorType::Q5_0 => DType::Q5_0,
        TensorType::Q5_1 => DType::Q5_1,
        TensorType::Q8_0 => DType::Q8_0,
        TensorType::Q2_K => DType::Q2_K,
        TensorType::Q3_K => DType::Q3_K,
        TensorType::Q4_K => DType::Q4_K,
        TensorType::Q5_K => DType::Q5_K,
        TensorType::Q6_K => DType::Q6_K,
    }
}

/// Bytes of a row from which they are read alone where only they are wanted: below, the pages that hold
/// them hold the rest of the row too, and one read of many rows is quicker.
const WORTH_A_READ_BYTES: usize = 4096;

/// A tensor by transformers' name, without `.weight` or `.bias`.
#[derive(Clone, Copy)]
pub(crate) enum Module<'a> {
    /// `model.norm`, `lm_head`, …
    Outer(&'a str),
    /// `self_attn.q_proj`, … of a layer.
    InLayer(usize, &'a str),
}

/// The part of a matrix that this rank takes.
#[derive(Clone)]
pub(crate) enum Cut {
    /// Some output features.
    Rows(Range<usize>),
    /// Some input features; the range lies on quantisation block borders.
    Cols(Range<usize>),
}

/// Whether a linear layer has a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bias {
    /// It must not be there.
    None,
    /// It must be there.
    Required,
    /// As the file has it (GGUF does not say it in its metadata).
    AsStored,
}

/// Reads one checkpoint for one rank.
pub(crate) struct WeightReader<'a> {
    weights: &'a Weights,
    /// Where there are no weights.
    made_up: Option<MadeUp>,
    /// The configuration's file: where a missing tensor is reported.
    path: &'a str,
    cx: &'a RankContext,
    spelling: Spelling,
    holdings: Holdings<'a>,
    progress: &'a dyn Fn(LoadProgress),
    taken: RefCell<HashSet<String>>,
    bytes_read: Cell<u64>,
    bytes_total: u64,
    bytes_on_device: Cell<u64>,
}

impl<'a> WeightReader<'a> {
    /// Reads the part `holdings` of `weights` for the rank of `cx`.
    pub(crate) fn new(
        weights: &'a Weights,
        path: &'a str,
        cx: &'a RankContext,
        spelling: Spelling,
        holdings: Holdings<'a>,
        progress: &'a dyn Fn(LoadProgress),
    ) -> Self {
        let here = |info: &&TensorInfo| !holdings.is_elsewhere(spelling, info.name());
        let bytes_total = weights.tensors().iter().filter(here).map(TensorInfo::num_bytes).sum();
        Self {
            weights,
            made_up: weights.made_up_type().map(|tensor_type| MadeUp::new(dtype_of(tensor_type))),
            path,
            cx,
            spelling,
            holdings,
            progress,
            taken: RefCell::default(),
            bytes_read: Cell::new(0),
            bytes_total,
            bytes_on_device: Cell::new(0),
        }
    }

    /// This rank among its peers.
    pub(crate) fn shard(&self) -> Shard {
        Shard { rank: self.cx.collective.rank(), world_size: self.cx.collective.world_size() }
    }

    /// Who wrote the checkpoint.
    pub(crate) fn dialect(&self) -> Dialect {
        self.spelling.dialect
    }

    /// Bytes that the device has taken so far.
    pub(crate) fn bytes_on_device(&self) -> u64 {
        self.bytes_on_device.get()
    }

    fn name(&self, module: Module<'_>, kind: &str) -> String {
        match module {
            Module::Outer(module) => self.spelling.outer(module, kind),
            Module::InLayer(layer_idx, module) => self.spelling.in_layer(layer_idx, module, kind),
        }
    }

    /// Elements that the weight packs into one block: columns may be cut at its multiples.
    pub(crate) fn block_elems(&self, module: Module<'_>) -> Result<usize, ModelError> {
        if let Some(made_up) = &self.made_up {
            return Ok(made_up.dtype.block_elems());
        }
        let (_, dtype) = self.tensor(&self.name(module, "weight"))?;
        Ok(dtype.block_elems())
    }

    /// The matrix `module.weight` `[rows, cols]`, cut to this rank's part.
    pub(crate) fn matrix(&self, module: Module<'_>, shape: [usize; 2], cut: &Cut) -> Result<Weight, ModelError> {
        let name = self.name(module, "weight");
        let (info, dtype) = match &self.made_up {
            Some(made_up) => (None, made_up.dtype),
            None => self.tensor(&name).map(|(info, dtype)| (Some(info), dtype))?,
        };
        if let Some(info) = info.filter(|info| info.shape() != shape) {
            return Err(self.misshaped(info, &shape));
        }
        let row_bytes = |cols: usize| {
            dtype
                .row_bytes(cols)
                .ok_or_else(|| self.error(&name, format!("{cols} columns are no whole blocks of {dtype}")))
        };
        let stored_row_bytes = row_bytes(shape[1])?;
        let (rows, cols) = match cut {
            Cut::Rows(rows) => (rows.clone(), 0..shape[1]),
            Cut::Cols(cols) => (0..shape[0], cols.clone()),
        };
        let bytes_before = row_bytes(cols.start)?;
        let kept_row_bytes = row_bytes(cols.len())?;
        let desc = WeightDesc { name: name.clone(), dtype, rows: rows.len(), cols: cols.len() };
        if let Some(made_up) = &self.made_up {
            let weight = self.cx.backend.load_repeated(desc, made_up.supply())?;
            self.bytes_on_device.set(self.bytes_on_device.get() + weight.len_bytes() as u64);
            return Ok(weight);
        }
        let mut staging = Vec::new();
        let weight = self.cx.backend.load_weight(desc, &mut |first_row, num_rows, out| {
            if kept_row_bytes == stored_row_bytes {
                self.weights.read_rows(&name, rows.start + first_row, num_rows, out)?;
            } else if kept_row_bytes >= WORTH_A_READ_BYTES {
                for (row, kept) in out.chunks_exact_mut(kept_row_bytes).enumerate() {
                    self.weights.read_in_row(&name, rows.start + first_row + row, bytes_before, kept)?;
                }
            } else {
                staging.resize(num_rows * stored_row_bytes, 0);
                self.weights.read_rows(&name, rows.start + first_row, num_rows, &mut staging)?;
                for (row, kept) in staging.chunks_exact(stored_row_bytes).zip(out.chunks_exact_mut(kept_row_bytes)) {
                    kept.copy_from_slice(&row[bytes_before..bytes_before + kept_row_bytes]);
                }
            }
            Ok(())
        })?;
        self.bytes_on_device.set(self.bytes_on_device.get() + weight.len_bytes() as u64);
        info.into_iter().for_each(|info| self.account(name.clone(), info));
        Ok(weight)
    }

    /// The vector `module.weight` of `len` elements, each plus `offset`, on the device.
    pub(crate) fn vector(&self, module: Module<'_>, len: usize, offset: f32) -> Result<Tensor, ModelError> {
        let name = self.name(module, "weight");
        let mut values = self.floats(&name, len)?;
        if offset != 0.0 {
            values.iter_mut().for_each(|x| *x += offset);
        }
        self.on_device(&name, &values)
    }

    /// The part `range` of the vector `module.bias` of `len` elements, if the layer has one.
    pub(crate) fn bias(
        &self,
        module: Module<'_>,
        len: usize,
        range: Range<usize>,
        bias: Bias,
    ) -> Result<Option<Tensor>, ModelError> {
        let name = self.name(module, "bias");
        if bias == Bias::None || (bias == Bias::AsStored && self.weights.get(&name).is_none()) {
            return Ok(None);
        }
        let values = self.floats(&name, len)?;
        self.on_device(&name, &values[range]).map(Some)
    }

    /// GGUF's rope divisors, `[len]`, where the file has them.
    pub(crate) fn rope_divisors(&self, len: usize) -> Result<Option<Vec<f32>>, ModelError> {
        const NAME: &str = "rope_freqs.weight";
        if self.dialect() != Dialect::Gguf || self.weights.get(NAME).is_none() {
            return Ok(None);
        }
        let values = self.floats(NAME, len)?;
        if values.iter().any(|x| !(x.is_finite() && *x > 0.0)) {
            return Err(self.error(NAME, "holds a divisor that is not above 0".into()));
        }
        Ok(Some(values))
    }

    /// Refuses tensors that no layer has read and that are no other stage's.
    pub(crate) fn finish(&self) -> Result<(), ModelError> {
        let taken = self.taken.borrow();
        let (spelling, holdings) = (self.spelling, self.holdings);
        let is_excused =
            |name: &str| spelling.is_harmless(name, holdings.tied_embeddings) || holdings.is_elsewhere(spelling, name);
        let unread =
            self.weights.tensors().iter().find(|info| !taken.contains(info.name()) && !is_excused(info.name()));
        if let Some(info) = unread {
            return Err(self.error(info.name(), "not used by this architecture; the result would be wrong".into()));
        }
        (self.progress)(LoadProgress { bytes_done: self.bytes_total, bytes_total: self.bytes_total });
        Ok(())
    }

    /// An error of cutting `module.weight` over ranks.
    pub(crate) fn uncut(&self, module: Module<'_>, error: &ShardError) -> ModelError {
        self.error(&self.name(module, "weight"), error.to_string())
    }

    fn tensor(&self, name: &str) -> Result<(&'a TensorInfo, DType), ModelError> {
        if self.weights.get(name).is_none() {
            return Err(self.error(name, "missing".into()));
        }
        let (info, tensor_type) = self.weights.loadable(name)?;
        Ok((info, dtype_of(tensor_type)))
    }

    /// A float vector as f32.
    fn floats(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        if self.made_up.is_some() {
            return Ok(MadeUp::vector(name, len));
        }
        let (info, dtype) = self.tensor(name)?;
        if info.shape() != [len] {
            return Err(self.misshaped(info, &[len]));
        }
        if dtype.is_quantized() {
            return Err(self.error(name, format!("a vector of floats is expected, got {dtype}")));
        }
        let mut bytes = vec![0; len * dtype.block_bytes()];
        self.weights.read_all(name, &mut bytes)?;
        let values = floats_from_bytes(dtype, &bytes);
        self.account(name.into(), info);
        Ok(values)
    }

    fn on_device(&self, name: &str, values: &[f32]) -> Result<Tensor, ModelError> {
        let tensor = self.cx.backend.load_vector(name, values)?;
        self.bytes_on_device.set(self.bytes_on_device.get() + tensor.buffer().len_bytes() as u64);
        Ok(tensor)
    }

    fn account(&self, name: String, info: &TensorInfo) {
        if self.taken.borrow_mut().insert(name) {
            self.bytes_read.set(self.bytes_read.get() + info.num_bytes());
            (self.progress)(LoadProgress { bytes_done: self.bytes_read.get(), bytes_total: self.bytes_total });
        }
    }

    fn misshaped(&self, info: &TensorInfo, expected: &[usize]) -> ModelError {
        self.error(info.name(), format!("expected shape {expected:?}, got {:?}", info.shape()))
    }

    fn error(&self, tensor: &str, detail: String) -> ModelError {
        let path = match self.weights.get(tensor) {
            Some(info) => self.weights.file_of(info).display().to_string(),
            None => self.path.to_owned(),
        };
        ModelError::Tensor { path, tensor: tensor.into(), detail }
    }
}

/// Little-endian floats of type `dtype` as f32.
fn floats_from_bytes(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let halves = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match dtype {
        DType::F16 => halves().map(|b| half::f16::from_le_bytes(b).to_f32()).collect(),
        DType::BF16 => halves().map(|b| half::bf16::from_le_bytes(b).to_f32()).collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_keep_their_geometry() {
        for tensor_type in TensorType::ALL {
            let dtype = dtype_of(tensor_type);
            assert_eq!(dtype.name(), tensor_type.name());
            assert_eq!(dtype.block_elems(), tensor_type.block_elems() as usize);
        }
    }

    #[test]
    fn floats_of_every_width() {
        assert_eq!(floats_from_bytes(DType::F32, &1.5f32.to_le_bytes()), [1.5]);
        assert_eq!(floats_from_bytes(DType::F16, &[0x00, 0x3e]), [1.5]);
        assert_eq!(floats_from_bytes(DType::BF16, &[0xc0, 0x3f]), [1.5]);
    }
}
