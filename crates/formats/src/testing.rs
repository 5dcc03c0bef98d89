//! Writers of small GGUF and safetensors images, for tests. They write what they are told, well-formed or not, and
//! remember where each field lies, so that a test can spoil exactly one. Panics on a test's own mistakes.

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

/// A GGUF image under construction.
#[derive(Clone, Debug)]
pub struct GgufWriter {
    version: u32,
    alignment: usize,
    keys: Vec<(String, u32, Vec<u8>)>,
    tensors: Vec<TestTensor>,
}

#[derive(Clone, Debug)]
struct TestTensor {
    name: String,
    dims: Vec<u64>,
    type_id: u32,
    data: Vec<u8>,
}

/// A finished file image and the position of its fields.
#[derive(Clone, Debug)]
pub struct Image {
    /// The file.
    pub bytes: Vec<u8>,
    marks: HashMap<String, usize>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self { version: 3, alignment: 32, keys: Vec::new(), tensors: Vec::new() }
    }
}

impl GgufWriter {
    /// Sets the version (3 unless set).
    #[must_use]
    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Sets the alignment that data is laid out with, and writes `general.alignment`.
    #[must_use]
    pub fn alignment(mut self, alignment: u32) -> Self {
        self.alignment = alignment as usize;
        self.u32("general.alignment", alignment)
    }

    /// Adds a key with a raw value of the given wire type.
    #[must_use]
    pub fn raw(mut self, key: &str, type_id: u32, value: Vec<u8>) -> Self {
        self.keys.push((key.to_owned(), type_id, value));
        self
    }

    /// Adds an unsigned 32-bit integer.
    #[must_use]
    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, value.to_le_bytes().to_vec())
    }

    /// Adds a 32-bit float.
    #[must_use]
    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, value.to_le_bytes().to_vec())
    }

    /// Adds a boolean.
    #[must_use]
    pub fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key, 7, vec![u8::from(value)])
    }

    /// Adds a string.
    #[must_use]
    pub fn str(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, string_bytes(value))
    }

    /// Adds an array of strings.
    #[must_use]
    pub fn strings(self, key: &str, values: &[&str]) -> Self {
        let items = values.iter().flat_map(|value| string_bytes(value)).collect();
        self.array(key, 8, values.len() as u64, items)
    }

    /// Adds an array of 32-bit floats.
    #[must_use]
    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        let items = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, 6, values.len() as u64, items)
    }

    /// Adds an array of signed 32-bit integers.
    #[must_use]
    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        let items = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, 5, values.len() as u64, items)
    }

    /// Adds an array of `count` elements of a wire type, given as raw bytes.
    #[must_use]
    pub fn array(self, key: &str, type_id: u32, count: u64, items: Vec<u8>) -> Self {
        let mut value = type_id.to_le_bytes().to_vec();
        value.extend(count.to_le_bytes());
        value.extend(items);
        self.raw(key, 9, value)
    }

    /// Adds a tensor. `shape` is row-major, as elsewhere in Pagemill; `data` is written as it is.
    #[must_use]
    pub fn tensor(mut self, name: &str, type_id: u32, shape: &[u64], data: Vec<u8>) -> Self {
        let dims = shape.iter().rev().copied().collect();
        self.tensors.push(TestTensor { name: name.to_owned(), dims, type_id, data });
        self
    }

    /// Adds a tensor of 32-bit floats.
    #[must_use]
    pub fn f32_tensor(self, name: &str, shape: &[u64], values: &[f32]) -> Self {
        self.tensor(name, 0, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    /// The file's bytes.
    #[must_use]
    pub fn build(&self) -> Vec<u8> {
        self.image().bytes
    }

    /// The file's bytes with marks. A mark names the first byte of a field: `version`, `n_tensors`, `n_kv`,
    /// `KEY/len`, `KEY/type`, `KEY/value`, and `TENSOR/len`, `/n_dims`, `/dim0`…, `/type`, `/offset`, `/data`.
    #[must_use]
    pub fn image(&self) -> Image {
        let mut image = Image { bytes: b"GGUF".to_vec(), marks: HashMap::new() };
        image.field("version", &self.version.to_le_bytes());
        image.field("n_tensors", &(self.tensors.len() as u64).to_le_bytes());
        image.field("n_kv", &(self.keys.len() as u64).to_le_bytes());
        for (key, type_id, value) in &self.keys {
            image.field(&format!("{key}/len"), &string_bytes(key));
            image.field(&format!("{key}/type"), &type_id.to_le_bytes());
            image.field(&format!("{key}/value"), value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            let name = &tensor.name;
            image.field(&format!("{name}/len"), &string_bytes(name));
            let num_dims = u32::try_from(tensor.dims.len()).unwrap_or(u32::MAX);
            image.field(&format!("{name}/n_dims"), &num_dims.to_le_bytes());
            for (idx, dim) in tensor.dims.iter().enumerate() {
                image.field(&format!("{name}/dim{idx}"), &dim.to_le_bytes());
            }
            image.field(&format!("{name}/type"), &tensor.type_id.to_le_bytes());
            image.field(&format!("{name}/offset"), &(offset as u64).to_le_bytes());
            offset = (offset + tensor.data.len()).next_multiple_of(self.alignment);
        }
        for tensor in &self.tensors {
            image.bytes.resize(image.bytes.len().next_multiple_of(self.alignment), 0);
            image.field(&format!("{}/data", tensor.name), &tensor.data);
        }
        image
    }
}

fn string_bytes(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

impl Image {
    fn field(&mut self, mark: &str, bytes: &[u8]) {
        self.marks.insert(mark.to_owned(), self.bytes.len());
        self.bytes.extend(bytes);
    }

    /// Position of a field.
    ///
    /// # Panics
    /// There is no such mark.
    #[must_use]
    pub fn offset(&self, mark: &str) -> usize {
        match self.marks.get(mark) {
            Some(offset) => *offset,
            None => panic!("no field '{mark}' in the image"),
        }
    }

    /// A copy of the file with other bytes `skip` bytes into a field.
    ///
    /// # Panics
    /// There is no such mark, or the file ends before.
    #[must_use]
    pub fn with(&self, mark: &str, skip: usize, bytes: &[u8]) -> Vec<u8> {
        let begin = self.offset(mark) + skip;
        let mut spoiled = self.bytes.clone();
        spoiled[begin..begin + bytes.len()].copy_from_slice(bytes);
        spoiled
    }
}

/// A safetensors file image under construction.
#[derive(Clone, Debug, Default)]
pub struct SafetensorsWriter {
    header: Map<String, Json>,
    data: Vec<u8>,
}

impl SafetensorsWriter {
    /// Adds a tensor; its bytes follow those of the last one.
    #[must_use]
    pub fn tensor(mut self, name: &str, dtype: &str, shape: &[u64], data: &[u8]) -> Self {
        let begin = self.data.len();
        self.data.extend(data);
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, self.data.len()] });
        self.header.insert(name.to_owned(), entry);
        self
    }

    /// Adds a tensor of 32-bit floats.
    #[must_use]
    pub fn f32_tensor(self, name: &str, shape: &[u64], values: &[f32]) -> Self {
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(name, "F32", shape, &data)
    }

    /// The file's bytes.
    #[must_use]
    pub fn build(&self) -> Vec<u8> {
        safetensors_image(&Json::Object(self.header.clone()).to_string(), &self.data)
    }
}

/// A safetensors file of any header text and data.
#[must_use]
pub fn safetensors_image(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}
