//! Chat templates: one prompt from a conversation.
//!
//! It decides what a model's Jinja template sees and how far it may go, and keeps apart what the template wrote and
//! what users wrote. It does not know tokens; a [`RenderedPrompt`] is turned into ids by
//! [`crate::Tokenizer::encode_prompt`].

mod clock;
mod context;
mod environment;
mod python;

use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value};

pub use clock::LocalTime;
pub use context::ContentFormat;

use crate::{LiteralGuard, TextError};
use context::Marker;

/// Steps (and 64-byte units of data) that a template may spend, beside what its input is worth.
const FUEL_BASE: u64 = 2_000_000;
/// Further steps for each byte of input: templates walk over each message a few times.
const FUEL_PER_INPUT_BYTE: u64 = 16;
/// The longest prompt a template may write, in bytes, beside eight times its input.
const OUTPUT_LEN_BASE: usize = 1 << 20;

/// The texts of the special tokens that templates refer to by name.
#[derive(Clone, Debug, Default)]
pub struct TemplateTokens {
    /// `bos_token`.
    pub bos: Option<String>,
    /// `eos_token`.
    pub eos: Option<String>,
    /// `unk_token`.
    pub unknown: Option<String>,
    /// `pad_token`.
    pub pad: Option<String>,
}

/// A conversation to render.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// Messages in the OpenAI form: objects with `role` and `content`.
    pub messages: &'a [Value],
    /// Tools offered to the model, in the OpenAI form.
    pub tools: Option<&'a [Value]>,
    /// Whether the prompt ends with the start of an answer.
    pub add_generation_prompt: bool,
    /// Further variables for the template, such as `enable_thinking`.
    pub extra: Option<&'a Map<String, Value>>,
    /// The time that `strftime_now` tells.
    pub now: LocalTime,
}

/// A prompt in which the words of users can be told from those of the template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderedPrompt {
    /// The prompt.
    pub text: String,
    /// Byte offsets into `text`, rising: a control token's literal around one of them was written by a user.
    pub(crate) guards: Vec<usize>,
}

/// A compiled chat template. Immutable: share it through an `Arc`.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    tokens: TemplateTokens,
    content_format: ContentFormat,
}

impl ChatTemplate {
    /// Compiles a model's template, and tries out which form of message content it understands.
    ///
    /// # Errors
    /// [`TextError::NoTemplate`] for `None`, [`TextError::TemplateSyntax`] for one that does not parse.
    pub fn new(source: Option<&str>, tokens: TemplateTokens) -> Result<Self, TextError> {
        let source = source.ok_or(TextError::NoTemplate)?;
        let environment = environment::build(source)?;
        let mut template =
            Self { environment, source: source.to_owned(), tokens, content_format: ContentFormat::AsGiven };
        template.content_format = context::detect_content_format(&template);
        Ok(template)
    }

    /// Hands message content to the template in this form instead of the one found out by [`ChatTemplate::new`].
    pub fn with_content_format(mut self, content_format: ContentFormat) -> Self {
        self.content_format = content_format;
        self
    }

    /// The form of message content that the template is given.
    pub fn content_format(&self) -> ContentFormat {
        self.content_format
    }

    /// The template's source text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation. Literals of control tokens in anything the caller passed are remembered as plain
    /// text: they are marked before the template runs, and whatever it does with strings (strip, split, join,
    /// replace, JSON), the marks come along and are taken out again afterwards.
    ///
    /// # Errors
    /// [`TextError::TemplateRaised`] with the template's own message if it refuses the conversation; the other
    /// template errors if it fails or goes beyond its limits; [`TextError::NoMarkLeft`].
    pub fn render(&self, input: &ChatInput<'_>, guard: &LiteralGuard) -> Result<RenderedPrompt, TextError> {
        let marker = Marker::new(guard, input, &self.source)?;
        let context = context::build(self, input, &marker);
        let input_len = context::input_len(input) + self.source.len();
        let text = self.run(context, input_len)?;
        Ok(marker.take_out(text))
    }

    fn run(&self, context: minijinja::Value, input_len: usize) -> Result<String, TextError> {
        let fuel = FUEL_BASE + FUEL_PER_INPUT_BYTE.saturating_mul(input_len as u64);
        let limit = OUTPUT_LEN_BASE.saturating_add(input_len.saturating_mul(8));
        // Cloning is cheap (shared parts); the fuel of an environment is fixed, and here it depends on the input.
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        let template = environment.get_template(environment::NAME).map_err(|error| failed(&error, fuel))?;
        let mut output = BoundedOutput { bytes: Vec::new(), limit };
        match template.render_captured_to(context, &mut output) {
            Ok(_) => {}
            Err(_) if output.bytes.len() > limit => return Err(TextError::TemplateOutputTooLong { limit }),
            Err(error) => return Err(failed(&error, fuel)),
        }
        String::from_utf8(output.bytes)
            .map_err(|error| TextError::TemplateFailed { line: 0, detail: error.to_string() })
    }
}

/// Collects output up to a limit; passing the limit fails the writer.
struct BoundedOutput {
    bytes: Vec<u8>,
    limit: usize,
}

impl std::io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        if self.bytes.len() > self.limit {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Sorts an engine error into ours.
fn failed(error: &minijinja::Error, fuel: u64) -> TextError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TextError::TemplateOutOfFuel { fuel };
    }
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(raised) = current.downcast_ref::<environment::Raised>() {
            return TextError::TemplateRaised { message: raised.0.clone() };
        }
        cause = current.source();
    }
    let detail =
        error.detail().map_or_else(|| error.kind().to_string(), |detail| format!("{}: {detail}", error.kind()));
    TextError::TemplateFailed { line: error.line().unwrap_or(0), detail }
}
