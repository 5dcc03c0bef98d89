//! Reading tensor bytes: kept-open files and positioned reads straight into the caller's memory, no map, no copy, no
//! shared cursor, so that many threads may load at once. Decides nothing about formats; the table says where bytes lie.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::{FormatError, FormatErrorKind, Result};
use crate::tensor::{TensorInfo, TensorTable};
use crate::tensor_type::TensorType;

/// A regular file that stays open.
#[derive(Debug)]
pub(crate) struct WeightFile {
    path: PathBuf,
    file: File,
    len: u64,
}

impl WeightFile {
    /// Opens a regular file; anything else (a folder, a pipe, a device) is refused before it can block.
    pub(crate) fn open(path: &Path, hint: &str) -> Result<Self> {
        let io_error = |error: io::Error| {
            FormatError::new(
                path,
                match error.kind() {
                    io::ErrorKind::NotFound => FormatErrorKind::MissingFile { hint: hint.to_owned() },
                    _ => FormatErrorKind::Io(error),
                },
            )
        };
        if !std::fs::metadata(path).map_err(io_error)?.is_file() {
            let reason = "not a regular file".to_owned();
            return Err(FormatError::new(path, FormatErrorKind::Invalid { reason }));
        }
        let file = File::open(path).map_err(io_error)?;
        let len = file.metadata().map_err(io_error)?.len();
        Ok(Self { path: path.to_path_buf(), file, len })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Length when it was opened.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Fills `into` from `offset`.
    pub(crate) fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let end = offset.saturating_add(into.len() as u64);
        self.file.read_exact_at(into, offset).map_err(|error| {
            let kind = match error.kind() {
                io::ErrorKind::UnexpectedEof => FormatErrorKind::FileShrank { begin: offset, end },
                _ => FormatErrorKind::Io(error),
            };
            FormatError::new(&self.path, kind).at(offset)
        })
    }
}

/// The tensors of a checkpoint, over one file or many. `&self` reads are independent of each other: share it between
/// threads.
#[derive(Debug)]
pub struct Weights {
    files: Vec<WeightFile>,
    table: TensorTable,
    /// The file or index that names the checkpoint in errors.
    origin: PathBuf,
    made_up: Option<TensorType>,
}

impl Weights {
    /// The tensors of `table` carry indices into `files`.
    pub(crate) fn new(origin: &Path, files: Vec<WeightFile>, table: TensorTable) -> Self {
        Self { files, table, origin: origin.to_path_buf(), made_up: None }
    }

    /// No tensors at all: whoever loads makes them up, in type `made_up`.
    pub(crate) fn made_up(origin: &Path, made_up: TensorType) -> Result<Self> {
        let table = TensorTable::new(Vec::new(), &[])?;
        Ok(Self { files: Vec::new(), table, origin: origin.to_path_buf(), made_up: Some(made_up) })
    }

    /// `Some`: there are no tensors; whoever loads makes them up, in this type.
    #[must_use]
    pub fn made_up_type(&self) -> Option<TensorType> {
        self.made_up
    }

    /// All tensors, in file order, including those of types that cannot be loaded.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        self.table.as_slice()
    }

    /// The tensor of that name, if there is one.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.table.get(name)
    }

    /// The tensor of that name and its type, ready to be read.
    ///
    /// # Errors
    /// There is no such tensor, or its type is not one that Pagemill loads.
    pub fn loadable(&self, name: &str) -> Result<(&TensorInfo, TensorType)> {
        let Some(tensor) = self.get(name) else {
            let kind = FormatErrorKind::MissingTensor { hint: String::new() };
            return Err(FormatError::new(&self.origin, kind).in_tensor(name));
        };
        match tensor.tensor_type() {
            Some(ty) => Ok((tensor, ty)),
            None => {
                Err(self.error(tensor, FormatErrorKind::UnsupportedTensorType { name: tensor.stored_type().name() }))
            }
        }
    }

    /// Reads rows `first_row..first_row + num_rows` of a tensor into `into`, as they are stored.
    /// [`TensorInfo::num_rows`] counts all dimensions but the last. One system call for up to 2 GiB; allocates nothing.
    ///
    /// # Errors
    /// As [`loadable`](Self::loadable); rows outside the tensor; `into` not exactly `num_rows` rows long; the file
    /// was shortened since it was opened, or cannot be read.
    pub fn read_rows(&self, name: &str, first_row: usize, num_rows: usize, into: &mut [u8]) -> Result<()> {
        let (tensor, _) = self.loadable(name)?;
        let invalid = |reason| Err(self.error(tensor, FormatErrorKind::InvalidRead { reason }));
        if first_row.checked_add(num_rows).is_none_or(|end| end > tensor.num_rows()) {
            let rows = tensor.num_rows();
            return invalid(format!("rows from {first_row}, {num_rows} of them, of a tensor of {rows} rows"));
        }
        // Neither product exceeds the tensor's own bytes, which were checked against the file.
        let row_bytes = tensor.row_bytes();
        let wanted = row_bytes * num_rows as u64;
        if into.len() as u64 != wanted {
            return invalid(format!("{num_rows} rows take {wanted} bytes, the buffer has {}", into.len()));
        }
        self.read(tensor, tensor.offset + row_bytes * first_row as u64, into)
    }

    /// Reads `into.len()` bytes of row `row` of a tensor from byte `first_byte` of the row on, as they are stored.
    ///
    /// # Errors
    /// As [`read_rows`](Self::read_rows); bytes outside the row.
    pub fn read_in_row(&self, name: &str, row: usize, first_byte: usize, into: &mut [u8]) -> Result<()> {
        let (tensor, _) = self.loadable(name)?;
        let row_bytes = tensor.row_bytes();
        let end = (first_byte as u64).checked_add(into.len() as u64);
        if row >= tensor.num_rows() || end.is_none_or(|end| end > row_bytes) {
            let (len, rows) = (into.len(), tensor.num_rows());
            let reason = format!(
                "{len} bytes from byte {first_byte} of row {row}, of a tensor of {rows} rows of {row_bytes} bytes"
            );
            return Err(self.error(tensor, FormatErrorKind::InvalidRead { reason }));
        }
        self.read(tensor, tensor.offset + row_bytes * row as u64 + first_byte as u64, into)
    }

    /// Reads a whole tensor into `into`, as it is stored.
    ///
    /// # Errors
    /// As [`read_rows`](Self::read_rows); `into` not exactly [`TensorInfo::num_bytes`] long.
    pub fn read_all(&self, name: &str, into: &mut [u8]) -> Result<()> {
        let (tensor, _) = self.loadable(name)?;
        if into.len() as u64 != tensor.num_bytes {
            let reason = format!("the tensor takes {} bytes, the buffer has {}", tensor.num_bytes, into.len());
            return Err(self.error(tensor, FormatErrorKind::InvalidRead { reason }));
        }
        self.read(tensor, tensor.offset, into)
    }

    /// Bytes of all tensors together.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.tensors().iter().fold(0, |sum, tensor| sum.saturating_add(tensor.num_bytes))
    }

    /// The file that holds a tensor of this checkpoint.
    #[must_use]
    pub fn file_of(&self, tensor: &TensorInfo) -> &Path {
        self.files.get(tensor.file_idx as usize).map_or(&*self.origin, WeightFile::path)
    }

    fn error(&self, tensor: &TensorInfo, kind: FormatErrorKind) -> FormatError {
        FormatError::new(self.file_of(tensor), kind).in_tensor(&tensor.name)
    }

    fn read(&self, tensor: &TensorInfo, offset: u64, into: &mut [u8]) -> Result<()> {
        match self.files.get(tensor.file_idx as usize) {
            Some(file) => file.read_exact_at(offset, into).map_err(|error| error.in_tensor(&tensor.name)),
            None => Err(self.error(tensor, FormatErrorKind::MissingTensor { hint: String::new() })),
        }
    }
}
