//! `model.safetensors.index.json`: which shard holds which tensor. Decides that shard names are plain file names and
//! that no tensor is listed twice. Does not open shards.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Error as _, MapAccess, Visitor};

use crate::error::{FormatError, FormatErrorKind, Result, printable};
use crate::json;

const MAX_INDEX_BYTES: u64 = 64 << 20;
/// The largest models come in under 200.
const MAX_SHARDS: usize = 4096;

/// A parsed index.
#[derive(Debug)]
pub struct ShardIndex {
    shards: Vec<String>,
    tensors: Vec<(Box<str>, u32)>,
}

impl ShardIndex {
    /// Reads an index file of at most 64 MiB.
    ///
    /// # Errors
    /// The file cannot be read or is malformed.
    pub fn open(path: &Path) -> Result<Self> {
        let bytes = json::read_limited(path, MAX_INDEX_BYTES, "expected the index of a sharded checkpoint")?;
        Self::parse(&bytes, path)
    }

    /// Parses an index. `file` is only named in errors.
    ///
    /// # Errors
    /// Not the JSON of an index; a tensor twice; a shard name that is a path.
    pub fn parse(bytes: &[u8], file: &Path) -> Result<Self> {
        let RawIndex { weight_map } = serde_json::from_slice(bytes).map_err(|error| json::error(file, &error))?;
        let WeightMap { shards, mut tensors } = weight_map;
        let in_map = |kind| FormatError::new(file, kind).in_field("weight_map");
        if tensors.is_empty() {
            return Err(in_map(FormatErrorKind::Invalid { reason: "no tensor is listed".to_owned() }));
        }
        if let Some(shard) = shards.iter().find(|shard| !is_plain_file_name(shard)) {
            let reason = format!("'{}' is not a plain file name", printable(shard));
            return Err(in_map(FormatErrorKind::Invalid { reason }));
        }
        tensors.sort_unstable();
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(FormatError::new(file, FormatErrorKind::DuplicateKey).in_tensor(&pair[0].0));
        }
        Ok(Self { shards, tensors })
    }

    /// File names of the shards, in the order in which they are first mentioned.
    #[must_use]
    pub fn shards(&self) -> &[String] {
        &self.shards
    }

    /// Tensor names, sorted, each with the index of its shard.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, u32)> {
        self.tensors.iter().map(|(name, shard_idx)| (&**name, *shard_idx))
    }
}

/// No folder, no parent, nothing hidden: an index must not reach outside its own folder.
fn is_plain_file_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

#[derive(Deserialize)]
struct RawIndex {
    weight_map: WeightMap,
}

struct WeightMap {
    shards: Vec<String>,
    tensors: Vec<(Box<str>, u32)>,
}

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: serde::Deserializer<'de>>(json: D) -> std::result::Result<Self, D::Error> {
        struct MapVisitor;
        impl<'de> Visitor<'de> for MapVisitor {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensor names and file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<WeightMap, A::Error> {
                let mut shard_idx: HashMap<String, u32> = HashMap::new();
                let mut weight_map = WeightMap { shards: Vec::new(), tensors: Vec::new() };
                while let Some((name, shard)) = map.next_entry::<Box<str>, String>()? {
                    let next_idx = weight_map.shards.len();
                    let idx = match shard_idx.get(&shard) {
                        Some(idx) => *idx,
                        None if next_idx == MAX_SHARDS => {
                            return Err(A::Error::custom(format!("more than {MAX_SHARDS} shards")));
                        }
                        None => {
                            let idx = u32::try_from(next_idx).map_err(A::Error::custom)?;
                            shard_idx.insert(shard.clone(), idx);
                            weight_map.shards.push(shard);
                            idx
                        }
                    };
                    weight_map.tensors.push((name, idx));
                }
                Ok(weight_map)
            }
        }
        json.deserialize_map(MapVisitor)
    }
}
