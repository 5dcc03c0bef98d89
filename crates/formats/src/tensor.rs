//! The list of tensors of a checkpoint: names, shapes, types and where their bytes lie. Decides which lists are
//! consistent (no name twice, no shared bytes, nothing behind the end of the file). Does not read weights.

use std::path::Path;

use crate::error::{FormatError, FormatErrorKind, Result};
use crate::tensor_type::{StoredType, TensorType};

/// One tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    pub(crate) name: Box<str>,
    pub(crate) shape: Box<[usize]>,
    /// First byte of the data, from the start of the file.
    pub(crate) offset: u64,
    pub(crate) num_bytes: u64,
    /// Where the entry stands in the header, for error messages.
    pub(crate) header_offset: u64,
    /// Which of the checkpoint's files holds it.
    pub(crate) file_idx: u32,
    pub(crate) stored: StoredType,
}

impl TensorInfo {
    /// The name, exactly as in the checkpoint.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Dimensions in row-major order, the contiguous one last: `[rows.., cols]`. Empty for a scalar.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The type on disk, loadable or not.
    #[must_use]
    pub fn stored_type(&self) -> StoredType {
        self.stored
    }

    /// The type, when Pagemill can load it.
    #[must_use]
    pub fn tensor_type(&self) -> Option<TensorType> {
        match self.stored {
            StoredType::Loadable(ty) => Some(ty),
            StoredType::Refused(_) => None,
        }
    }

    /// Bytes of the whole tensor in the file.
    #[must_use]
    pub fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    /// Elements of the last dimension; 1 for a scalar.
    #[must_use]
    pub fn num_cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Product of all dimensions but the last: 1 for a vector.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// Bytes of one row, the unit of [`read_rows`](crate::Weights::read_rows).
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        self.num_bytes.checked_div(self.num_rows() as u64).unwrap_or(0)
    }
}

/// Number of elements of a shape, or which rule it breaks.
pub(crate) fn num_elements(shape: &[usize]) -> std::result::Result<u64, FormatErrorKind> {
    // With a zero anywhere the product is 0; the others must not overflow all the same.
    let product = shape.iter().filter(|dim| **dim != 0).try_fold(1u64, |product, dim| product.checked_mul(*dim as u64));
    match product {
        Some(product) if !shape.contains(&0) => Ok(product),
        Some(_) => Ok(0),
        None => Err(FormatErrorKind::InvalidShape { reason: format!("the product of {shape:?} overflows") }),
    }
}

/// Tensors in file order, found by name by binary search.
#[derive(Debug)]
pub struct TensorTable {
    tensors: Vec<TensorInfo>,
    by_name: Vec<u32>,
}

impl TensorTable {
    /// Refuses a name that appears twice. `files` are the paths that `file_idx` counts.
    pub(crate) fn new(tensors: Vec<TensorInfo>, files: &[&Path]) -> Result<Self> {
        let path_of = |tensor: &TensorInfo| files.get(tensor.file_idx as usize).copied().unwrap_or(Path::new(""));
        let Ok(count) = u32::try_from(tensors.len()) else {
            let kind = FormatErrorKind::LimitExceeded {
                what: "number of tensors",
                found: tensors.len() as u64,
                limit: u64::from(u32::MAX),
            };
            return Err(FormatError::new(files.first().copied().unwrap_or(Path::new("")), kind));
        };
        let mut by_name: Vec<u32> = (0..count).collect();
        // Ties are broken by position, so that of two equal names the later one is reported.
        by_name.sort_unstable_by_key(|idx| (&*tensors[*idx as usize].name, *idx));
        for pair in by_name.windows(2) {
            let (first, second) = (&tensors[pair[0] as usize], &tensors[pair[1] as usize]);
            if first.name == second.name {
                let kind = FormatErrorKind::DuplicateTensor { other: path_of(first).display().to_string() };
                return Err(FormatError::new(path_of(second), kind).in_tensor(&second.name).at(second.header_offset));
            }
        }
        Ok(Self { tensors, by_name })
    }

    /// All tensors, in file order.
    #[must_use]
    pub fn as_slice(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        let found = self.by_name.binary_search_by_key(&name, |idx| &*self.tensors[*idx as usize].name).ok()?;
        self.tensors.get(self.by_name[found] as usize)
    }
}

/// Whether bytes between tensors may belong to none.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holes {
    Allowed,
    Refused,
}

/// Checks one file's tensors against each other and against the file's length. `data_begin` is the first byte of the
/// data section.
pub(crate) fn check_layout(
    file: &Path,
    tensors: &[TensorInfo],
    data_begin: u64,
    file_len: u64,
    holes: Holes,
) -> Result<()> {
    let end_of = |tensor: &TensorInfo| tensor.offset.saturating_add(tensor.num_bytes);
    let error =
        |tensor: &TensorInfo, kind| FormatError::new(file, kind).in_tensor(&tensor.name).at(tensor.header_offset);
    if let Some(tensor) = tensors.iter().find(|tensor| end_of(tensor) > file_len) {
        let kind = FormatErrorKind::TensorBeyondEnd { begin: tensor.offset, end: end_of(tensor), file_len };
        return Err(error(tensor, kind));
    }
    let mut order: Vec<u32> = (0u32..).take(tensors.len()).collect();
    order.sort_unstable_by_key(|idx| {
        let tensor = &tensors[*idx as usize];
        (tensor.offset, end_of(tensor), *idx)
    });
    let mut covered = data_begin;
    let mut last: Option<&TensorInfo> = None;
    for tensor in order.iter().map(|idx| &tensors[*idx as usize]) {
        if tensor.offset < covered {
            let other = last.map_or_else(String::new, |last| crate::error::printable(&last.name));
            return Err(error(tensor, FormatErrorKind::OverlappingTensor { other }));
        }
        if tensor.offset > covered && holes == Holes::Refused {
            let kind = FormatErrorKind::Hole { begin: covered - data_begin, end: tensor.offset - data_begin };
            return Err(error(tensor, kind));
        }
        covered = end_of(tensor);
        last = Some(tensor);
    }
    if covered < file_len && holes == Holes::Refused {
        let kind = FormatErrorKind::Hole { begin: covered - data_begin, end: file_len - data_begin };
        return Err(FormatError::new(file, kind).at(covered));
    }
    Ok(())
}
