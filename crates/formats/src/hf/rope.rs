//! Rotary position settings of `config.json`, in their forms on disk: `rope_theta` with `rope_scaling` (and Gemma 3's
//! `rope_local_base_freq`), or `rope_parameters`, flat or by layer type. Decides that contradicting forms are refused.
//! Does not know any rope type.

use crate::error::Result;
use crate::json::JsonFields;

/// Settings of one kind of layer.
#[derive(Clone, Debug)]
pub struct RopeParameters {
    /// `default`, `linear`, `llama3`, `yarn`, … as on disk.
    pub rope_type: String,
    /// Base of the frequencies; `None` leaves it to the architecture.
    pub theta: Option<f64>,
    /// What else the rope type needs: `factor`, `low_freq_factor`, …
    pub fields: JsonFields,
}

/// Settings of all layers.
#[derive(Clone, Debug)]
pub enum RopeSettings {
    /// One setting for every layer.
    Uniform(RopeParameters),
    /// One for each layer type (`full_attention`, `sliding_attention`), in file order.
    PerLayerType(Vec<(String, RopeParameters)>),
}

impl RopeSettings {
    pub(crate) fn read(config: &JsonFields) -> Result<Self> {
        let theta = config.get_f64("rope_theta")?;
        let local_theta = config.get_f64("rope_local_base_freq")?;
        let scaling = config.get_object("rope_scaling")?;
        if let Some(parameters) = config.get_object("rope_parameters")? {
            if scaling.is_some_and(|scaling| scaling.raw() != parameters.raw()) {
                return Err(config.invalid("rope_scaling", "contradicts rope_parameters"));
            }
            return Self::read_parameters(&parameters, theta);
        }
        let empty = || JsonFields::new(config.file(), "rope_scaling.", serde_json::Map::new());
        let uniform = RopeParameters::read(scaling.unwrap_or_else(empty), theta)?;
        match local_theta {
            None => Ok(Self::Uniform(uniform)),
            // Gemma 3 before rope_parameters: the scaling is for the layers of full attention only.
            Some(local_theta) => Ok(Self::PerLayerType(vec![
                ("full_attention".to_owned(), uniform),
                ("sliding_attention".to_owned(), RopeParameters::read(empty(), Some(local_theta))?),
            ])),
        }
    }

    fn read_parameters(parameters: &JsonFields, theta: Option<f64>) -> Result<Self> {
        if !parameters.raw().values().any(serde_json::Value::is_object) {
            return RopeParameters::read(parameters.clone(), theta).map(Self::Uniform);
        }
        let mut layer_types = Vec::new();
        for key in parameters.raw().keys() {
            if let Some(object) = parameters.get_object(key)? {
                layer_types.push((key.clone(), RopeParameters::read(object, theta)?));
            }
        }
        Ok(Self::PerLayerType(layer_types))
    }
}

impl RopeParameters {
    fn read(object: JsonFields, default_theta: Option<f64>) -> Result<Self> {
        let rope_type = match (object.get_str("rope_type")?, object.get_str("type")?) {
            (Some(rope_type), Some(older)) if rope_type != older => {
                return Err(object.invalid("type", &format!("contradicts rope_type '{rope_type}'")));
            }
            (Some(name), _) | (None, Some(name)) => name.to_owned(),
            (None, None) => "default".to_owned(),
        };
        let theta = object.get_f64("rope_theta")?.or(default_theta);
        Ok(Self { rope_type, theta, fields: object.without(&["rope_type", "type", "rope_theta"]) })
    }
}
