//! Rope settings out of a configuration. Decides which rope types and parameters are understood; the
//! forms on disk are the formats room's business, the frequencies are worked out in `crate::rope`.

use super::RawConfig;
use crate::ModelError;
use crate::rope::{RopeScaling, RopeSettings, yarn_magnitude};
use pagemill_formats::hf;
use serde_json::{Map, Value};

/// Parameters that a set of rope settings may hold, whichever type it states. `magnitude` is GGUF's
/// `attn_factor`.
const KNOWN: &[&str] = &[
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",
    "high_freq_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "magnitude",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "truncate",
];

/// The rope settings of a file: one set, or one for each layer type.
#[derive(Clone, Debug)]
pub(super) enum RawRope {
    Uniform(Map<String, Value>),
    PerLayerType(Vec<(String, Map<String, Value>)>),
}

impl From<&hf::RopeSettings> for RawRope {
    fn from(settings: &hf::RopeSettings) -> Self {
        let map = |parameters: &hf::RopeParameters| {
            let mut map = parameters.fields.raw().clone();
            map.insert("rope_type".into(), parameters.rope_type.clone().into());
            if let Some(theta) = parameters.theta {
                map.insert("rope_theta".into(), theta.into());
            }
            map
        };
        match settings {
            hf::RopeSettings::Uniform(parameters) => Self::Uniform(map(parameters)),
            hf::RopeSettings::PerLayerType(types) => {
                Self::PerLayerType(types.iter().map(|(name, parameters)| (name.clone(), map(parameters))).collect())
            }
        }
    }
}

/// One set of settings and where it stands, for messages.
struct RopeFields<'a> {
    raw: &'a RawConfig,
    place: String,
    fields: &'a Map<String, Value>,
}

impl RawConfig {
    /// The rope of all layers. `default_theta` is the architecture's base where the file states none.
    ///
    /// # Errors
    /// An unknown rope type, a parameter that the type needs and lacks, one that is not understood, or
    /// settings by layer type.
    pub(crate) fn rope(&self, head_dim: usize, default_theta: f64) -> Result<RopeSettings, ModelError> {
        match &self.rope {
            RawRope::Uniform(fields) => {
                let place = if self.get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
                RopeFields { raw: self, place: place.into(), fields }.read(head_dim, default_theta)
            }
            RawRope::PerLayerType(types) => {
                let names = types.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
                let detail = "this architecture has one kind of rope";
                Err(self.unsupported("rope_parameters", &format!("settings for {names}"), detail))
            }
        }
    }

    /// The rope of layers of `layer_type`, or `None` where the file does not distinguish them.
    ///
    /// # Errors
    /// As [`rope`](Self::rope); also when the file distinguishes layer types, but not this one.
    pub(crate) fn rope_of(
        &self,
        layer_type: &str,
        head_dim: usize,
        default_theta: f64,
    ) -> Result<Option<RopeSettings>, ModelError> {
        let RawRope::PerLayerType(types) = &self.rope else {
            return Ok(None);
        };
        let place = format!("rope_parameters.{layer_type}");
        match types.iter().find(|(name, _)| name == layer_type) {
            Some((_, fields)) => RopeFields { raw: self, place, fields }.read(head_dim, default_theta).map(Some),
            None => Err(self.bad(&place, "missing")),
        }
    }

    fn number(&self, field: &str, value: Option<&Value>) -> Result<Option<f64>, ModelError> {
        match value {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) if number.is_finite() => Ok(Some(number)),
                _ => Err(self.bad(field, &format!("expected a number, found {value}"))),
            },
        }
    }
}

impl RopeFields<'_> {
    fn read(&self, head_dim: usize, default_theta: f64) -> Result<RopeSettings, ModelError> {
        let unknown = self.fields.iter().find(|(key, value)| !KNOWN.contains(&key.as_str()) && !super::is_off(value));
        if let Some((key, value)) = unknown {
            return Err(self.raw.unsupported(&self.named(key), value, "not understood"));
        }
        let theta = self.number("rope_theta")?.unwrap_or(default_theta);
        if theta <= 1.0 {
            return Err(self.raw.bad("rope_theta", &format!("{theta} is no base of frequencies")));
        }
        let partial = match self.number("partial_rotary_factor")? {
            Some(partial) => partial,
            None => self.raw.number("partial_rotary_factor", self.raw.get("partial_rotary_factor"))?.unwrap_or(1.0),
        };
        let rotary_dim = rotary_dim(head_dim, partial)
            .ok_or_else(|| self.raw.bad("partial_rotary_factor", &format!("{partial} of a head of {head_dim}")))?;
        let magnitude = self.number("magnitude")?.unwrap_or(1.0);
        Ok(RopeSettings { theta, rotary_dim, scaling: self.scaling()?, magnitude })
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    fn named(&self, key: &str) -> String {
        format!("{}.{key}", self.place)
    }

    fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.raw.number(&self.named(key), self.get(key))
    }

    /// A number above 0 that must be there.
    fn positive(&self, key: &str) -> Result<f64, ModelError> {
        match self.number(key)? {
            Some(number) if number > 0.0 => Ok(number),
            Some(number) => Err(self.raw.bad(&self.named(key), &format!("{number} must be above 0"))),
            None => Err(self.raw.bad(&self.named(key), "missing")),
        }
    }

    fn scaling(&self) -> Result<RopeScaling, ModelError> {
        match self.get("rope_type") {
            None => Ok(RopeScaling::Default),
            Some(Value::String(kind)) if kind == "default" => Ok(RopeScaling::Default),
            Some(Value::String(kind)) if kind == "linear" => {
                Ok(RopeScaling::Linear { factor: self.positive("factor")? })
            }
            Some(Value::String(kind)) if kind == "llama3" => self.llama3(),
            Some(Value::String(kind)) if kind == "yarn" => self.yarn(),
            Some(other) => {
                let detail = "supported rope types are default, linear, llama3 and yarn";
                Err(self.raw.unsupported(&self.named("rope_type"), other, detail))
            }
        }
    }

    fn llama3(&self) -> Result<RopeScaling, ModelError> {
        let (low_freq_factor, high_freq_factor) =
            (self.positive("low_freq_factor")?, self.positive("high_freq_factor")?);
        if low_freq_factor >= high_freq_factor {
            return Err(self.raw.bad(&self.named("high_freq_factor"), "must be above low_freq_factor"));
        }
        Ok(RopeScaling::Llama3 {
            factor: self.positive("factor")?,
            low_freq_factor,
            high_freq_factor,
            original_len: self.positive("original_max_position_embeddings")?,
        })
    }

    fn yarn(&self) -> Result<RopeScaling, ModelError> {
        let max_len = || self.raw.number("max_position_embeddings", self.raw.get("max_position_embeddings"));
        let original_len = match self.get("original_max_position_embeddings") {
            Some(_) => self.positive("original_max_position_embeddings")?,
            None => max_len()?.unwrap_or(0.0).max(1.0),
        };
        let factor = match self.get("factor") {
            Some(_) => self.positive("factor")?,
            None => max_len()?.unwrap_or(0.0).max(1.0) / original_len,
        };
        // transformers takes 0 for "not stated" in these four.
        let stated = |key: &str| self.number(key).map(|number| number.filter(|n| *n != 0.0));
        let magnitude = match (self.number("attention_factor")?, stated("mscale")?, stated("mscale_all_dim")?) {
            (Some(magnitude), _, _) => magnitude,
            (None, Some(mscale), Some(all_dim)) => yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim),
            (None, _, _) => yarn_magnitude(factor, 1.0),
        };
        let truncate = match self.get("truncate") {
            None => true,
            Some(Value::Bool(truncate)) => *truncate,
            Some(other) => {
                return Err(self.raw.bad(&self.named("truncate"), &format!("expected a bool, found {other}")));
            }
        };
        let (beta_fast, beta_slow) = (stated("beta_fast")?.unwrap_or(32.0), stated("beta_slow")?.unwrap_or(1.0));
        if !(beta_slow > 0.0 && beta_fast >= beta_slow) {
            return Err(self.raw.bad(&self.named("beta_fast"), "beta_fast ≥ beta_slow > 0 is expected"));
        }
        Ok(RopeScaling::Yarn { factor, original_len, beta_fast, beta_slow, truncate, magnitude })
    }
}

/// The even number of elements that turn, rounded down as transformers does.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // bounded by head_dim
fn rotary_dim(head_dim: usize, partial: f64) -> Option<usize> {
    if !(partial > 0.0 && partial <= 1.0) {
        return None;
    }
    let dim = (head_dim as f64 * partial + 1e-9).floor() as usize;
    (dim >= 2 && dim.is_multiple_of(2)).then_some(dim)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::tests::raw;
    use serde_json::json;

    fn rope(fields: Value, layer_type: Option<&str>) -> Result<RopeSettings, String> {
        let config = raw(fields);
        let found = match layer_type {
            None => config.rope(32, 10_000.0),
            Some(name) => config.rope_of(name, 32, 10_000.0).map(|found| found.unwrap()),
        };
        found.map_err(|error| error.to_string())
    }

    fn refused(fields: Value, expected: &str) {
        let error = rope(fields, None).unwrap_err();
        assert!(error.contains(expected), "expected {expected:?} in {error:?}");
    }

    #[test]
    fn both_forms_say_the_same() {
        let old = json!({
            "rope_theta": 5e5,
            "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                             "original_max_position_embeddings": 512, "rope_type": "llama3"}
        });
        let new = json!({
            "rope_parameters": {"rope_theta": 5e5, "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                                "original_max_position_embeddings": 512, "rope_type": "llama3"}
        });
        let expected =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 512.0 };
        let expected = RopeSettings { theta: 5e5, rotary_dim: 32, scaling: expected, magnitude: 1.0 };
        assert_eq!(rope(old, None).unwrap(), expected);
        assert_eq!(rope(new, None).unwrap(), expected);
    }

    #[test]
    fn nothing_or_null_is_the_default() {
        let expected = RopeSettings { theta: 10_000.0, rotary_dim: 32, scaling: RopeScaling::Default, magnitude: 1.0 };
        for fields in [
            json!({}),
            json!({"rope_scaling": null}),
            json!({"rope_scaling": {}}),
            json!({"rope_scaling": {"type": null}}),
            json!({"rope_scaling": {"rope_type": "default"}}),
            json!({"rope_parameters": {"rope_type": "default", "rope_theta": 10000}}),
        ] {
            assert_eq!(rope(fields, None).unwrap(), expected);
        }
    }

    #[test]
    fn one_set_for_each_layer_type() {
        let fields = json!({"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}
        }});
        let full = rope(fields.clone(), Some("full_attention")).unwrap();
        assert_eq!((full.theta, full.scaling), (1e6, RopeScaling::Linear { factor: 8.0 }));
        let sliding = rope(fields.clone(), Some("sliding_attention")).unwrap();
        assert_eq!((sliding.theta, sliding.scaling), (1e4, RopeScaling::Default));
        let error = rope(fields.clone(), Some("chunked_attention")).unwrap_err();
        assert!(error.contains("rope_parameters.chunked_attention: missing"), "{error}");
        refused(fields, "rope_parameters = settings for full_attention, sliding_attention");
        assert!(raw(json!({})).rope_of("full_attention", 32, 10_000.0).unwrap().is_none());
    }

    #[test]
    fn yarn_defaults_and_mscale() {
        let yarn = |fields: Value| match rope(fields, None).unwrap().scaling {
            RopeScaling::Yarn { factor, original_len, beta_fast, beta_slow, truncate, magnitude } => {
                (factor, original_len, beta_fast, beta_slow, truncate, magnitude)
            }
            other => panic!("{other:?}"),
        };
        let got = yarn(json!({"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 2048}));
        assert_eq!(got, (4.0, 2048.0, 32.0, 1.0, true, yarn_magnitude(4.0, 1.0)));
        let got = yarn(json!({"max_position_embeddings": 4096, "rope_parameters": {
            "rope_type": "yarn", "original_max_position_embeddings": 1024, "truncate": false,
            "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2}}));
        assert_eq!(got, (4.0, 1024.0, 16.0, 2.0, false, yarn_magnitude(4.0, 1.0) / yarn_magnitude(4.0, 0.5)));
        let got = yarn(json!({"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5,
                                                "original_max_position_embeddings": 16}}));
        assert_eq!(got.5, 1.5);
    }

    #[test]
    fn partial_rotary_factor_cuts_the_head() {
        assert_eq!(rope(json!({"partial_rotary_factor": 0.5}), None).unwrap().rotary_dim, 16);
        assert_eq!(rope(json!({"rope_parameters": {"partial_rotary_factor": 0.25}}), None).unwrap().rotary_dim, 8);
        refused(json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor");
        refused(json!({"partial_rotary_factor": 0.1}), "partial_rotary_factor");
    }

    #[test]
    fn what_is_not_computed_is_refused_by_name() {
        refused(
            json!({"rope_scaling": {"type": "longrope"}}),
            "rope_scaling.rope_type = \"longrope\" is not supported",
        );
        refused(json!({"rope_parameters": {"rope_type": "dynamic"}}), "rope_parameters.rope_type = \"dynamic\"");
        refused(json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.factor: missing");
        refused(json!({"rope_scaling": {"type": "linear", "factor": 0}}), "rope_scaling.factor: 0 must be above 0");
        refused(json!({"rope_scaling": {"type": "linear", "factor": "2"}}), "rope_scaling.factor: expected a number");
        refused(json!({"rope_scaling": {"mrope_section": [1, 2]}}), "rope_scaling.mrope_section = [1,2]");
        refused(json!({"rope_theta": 0}), "rope_theta: 0");
        let llama3 = json!({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4,
                                             "high_freq_factor": 1, "original_max_position_embeddings": 64}});
        refused(llama3, "rope_scaling.high_freq_factor: must be above");
        let yarn = json!({"rope_scaling": {"type": "yarn", "factor": 8, "beta_fast": 1, "beta_slow": 2}});
        refused(yarn, "rope_scaling.beta_fast");
    }
}
