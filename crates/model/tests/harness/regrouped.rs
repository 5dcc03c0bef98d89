//! The zoo's models with other numbers of heads: KV heads are repeated, each with the query heads that read it, and
//! what the copies of a head give is weighed so that together they give what it gave. The model says what it said
//! before, and its golden outputs hold.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // tests

use half::{bf16, f16};
use serde_json::{Map, Value, json};
use std::ops::Range;
use std::path::Path;
use tempfile::TempDir;

/// A checkpoint's tensors: what the header says of each, and the bytes behind it.
struct Tensors {
    header: Map<String, Value>,
    bytes: Vec<u8>,
}

impl Tensors {
    fn open(file: &Path) -> Self {
        let all = std::fs::read(file).unwrap();
        let (len, rest) = all.split_first_chunk::<8>().unwrap();
        let (header, bytes) = rest.split_at(u64::from_le_bytes(*len) as usize);
        Self { header: serde_json::from_slice(header).unwrap(), bytes: bytes.to_vec() }
    }

    /// Rows of a matrix, or elements of a vector, as f32.
    fn rows(&self, entry: &Value) -> Vec<Vec<f32>> {
        let numbers = |value: &Value| -> Vec<usize> {
            value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
        };
        let (shape, offsets) = (numbers(&entry["shape"]), numbers(&entry["data_offsets"]));
        let bytes = &self.bytes[offsets[0]..offsets[1]];
        let halves = bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
        let values: Vec<f32> = match entry["dtype"].as_str().unwrap() {
            "F16" => halves.map(|b| f16::from_le_bytes(b).to_f32()).collect(),
            "BF16" => halves.map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
            "F32" => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            other => panic!("no zoo model has {other}"),
        };
        values.chunks_exact(shape.get(1).copied().unwrap_or(1)).map(<[f32]>::to_vec).collect()
    }
}

/// Which heads there are.
struct Groups<'a> {
    /// For each KV head the one that it is a copy of.
    kv_heads: &'a [usize],
    /// Query heads that read one.
    group: usize,
    head_dim: usize,
}

impl Groups<'_> {
    /// Features of the heads, `per_kv_head` of which belong to a KV head.
    fn features(&self, per_kv_head: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let len = per_kv_head * self.head_dim;
        self.kv_heads.iter().map(move |&head| (head, head * len..(head + 1) * len))
    }

    /// Rows of a projection to heads.
    fn repeat_rows(&self, rows: &[Vec<f32>], per_kv_head: usize) -> Vec<Vec<f32>> {
        self.features(per_kv_head).flat_map(|(_, features)| rows[features].to_vec()).collect()
    }

    /// Columns of the projection from heads: the copies of a head weigh 1 together, and each another part.
    fn repeat_columns(&self, row: &[f32]) -> Vec<f32> {
        let mut seen = vec![0; self.kv_heads.len()];
        let weighed = self.features(self.group).flat_map(|(head, features)| {
            let copies = self.kv_heads.iter().filter(|other| **other == head).count();
            seen[head] += 1;
            let part = 2 * seen[head];
            let weight = part as f32 / (copies * (copies + 1)) as f32;
            row[features].iter().map(move |x| x * weight).collect::<Vec<_>>()
        });
        weighed.collect()
    }
}

/// The model in `folder`, where KV head `i` is a copy of its KV head `kv_heads[i]`.
pub fn regrouped(folder: &Path, kv_heads: &[usize]) -> TempDir {
    let mut config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    let size = |field: &str| config[field].as_u64().map(|n| n as usize);
    let num_heads = size("num_attention_heads").unwrap();
    let groups = Groups {
        kv_heads,
        group: num_heads / size("num_key_value_heads").unwrap(),
        head_dim: size("head_dim").unwrap_or_else(|| size("hidden_size").unwrap() / num_heads),
    };
    config["num_key_value_heads"] = json!(kv_heads.len());
    config["num_attention_heads"] = json!(kv_heads.len() * groups.group);
    config["head_dim"] = json!(groups.head_dim);

    let stored = Tensors::open(&folder.join("model.safetensors"));
    let (mut header, mut bytes) = (Map::new(), Vec::new());
    for (name, entry) in stored.header.iter().filter(|(name, _)| *name != "__metadata__") {
        let rows = stored.rows(entry);
        let is_matrix = entry["shape"].as_array().unwrap().len() == 2;
        let is = |module: &str| name.contains(&format!("self_attn.{module}_proj."));
        let rows = match () {
            () if is("q") => groups.repeat_rows(&rows, groups.group),
            () if is("k") || is("v") => groups.repeat_rows(&rows, 1),
            () if is("o") && is_matrix => rows.iter().map(|row| groups.repeat_columns(row)).collect(),
            () => rows,
        };
        let start = bytes.len();
        bytes.extend(rows.iter().flatten().flat_map(|x| x.to_le_bytes()));
        let shape = if is_matrix { vec![rows.len(), rows[0].len()] } else { vec![rows.len()] };
        header.insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": [start, bytes.len()]}));
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes].concat();

    let changed = tempfile::tempdir().unwrap();
    std::fs::copy(folder.join("tokenizer.json"), changed.path().join("tokenizer.json")).unwrap();
    std::fs::write(changed.path().join("model.safetensors"), file).unwrap();
    std::fs::write(changed.path().join("config.json"), config.to_string()).unwrap();
    changed
}
