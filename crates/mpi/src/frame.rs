//! What processes tell each other about a model's work: a header, a kind, and a body of fixed fields.
//! Decides which bytes are a frame and which are not; knows no socket. Tensors do not travel here.
//!
//! Every number is little-endian. Every list has a length that is checked twice: against a cap, and against
//! the bytes that are there, before anything is allocated for it.
//!
//! ```text
//! header  [0, 4) "PGML"  [4, 6) version  [6, 8) kind  [8, 12) length of the body
//! ```

mod fields;
mod invitation;
mod output;
mod step;

use fields::{Reader, Writer};
pub use invitation::{Invitation, MAX_ADDRESSES, MAX_INVITATION_BYTES};
use pagemill_engine::StepInput;
use pagemill_scheduler::StepOutput;
use std::sync::Arc;

/// Version of all frames: ranks of one world run one version of Pagemill.
pub const VERSION: u16 = 2;
/// Bytes in front of every body.
pub const HEADER_BYTES: usize = 12;
/// Bytes of any body at most.
pub const MAX_BODY_BYTES: usize = 64 << 20;
/// Bytes of the body of a [`Hello`] at most: all that is read of a peer that is not known yet.
pub const MAX_HELLO_BYTES: usize = 512;

const MAGIC: [u8; 4] = *b"PGML";
const MAX_HOST_BYTES: usize = 256;
/// Bytes of a reason at most; longer ones are cut.
const MAX_REASON_BYTES: usize = 4096;

/// 128 random bits that only the world's processes know.
pub type Token = [u8; 16];
/// What all ranks must agree on: the model's bytes and the configuration.
pub type Fingerprint = [u8; 32];

/// A rank's first word to rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// From the invitation.
    pub token: Token,
    /// Ranks in all.
    pub world_size: u32,
    /// The sender's, `1..world_size`.
    pub rank: u32,
    /// Of what it is about to load.
    pub fingerprint: Fingerprint,
    /// Its GPU; none on the CPU.
    pub gpu: Option<Gpu>,
    /// Name of its host, at most 256 bytes.
    pub host: String,
}

/// The GPU that a rank runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its own number, as the driver tells it.
    pub uuid: [u8; 16],
    /// Whether it is meant for several ranks.
    pub is_shared: bool,
}

impl Gpu {
    /// As the vendor's tools print the number: `GPU-5d1c2c1b-…`.
    #[must_use]
    pub fn name(&self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let [a, b, c, d, e] = [0..4, 4..6, 6..8, 8..10, 10..16].map(|range| hex(&self.uuid[range]));
        format!("GPU-{a}-{b}-{c}-{d}-{e}")
    }
}

/// What a rank counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Microseconds in steps.
    pub busy_us: u64,
    /// Growths of the workspace.
    pub workspace_grown: u64,
}

/// Everything that is ever said.
#[derive(Clone, Debug, PartialEq)]
pub enum Frame {
    /// A rank's first word.
    Hello(Hello),
    /// Rank 0's answer, with the invitation's other token.
    Welcome {
        /// Proves that this is the rank 0 that sent the invitation.
        token: Token,
    },
    /// A rank has loaded its share and rehearsed.
    Loaded {
        /// Memory that its process could take before, in bytes.
        available_bytes: u64,
        /// Weights on its device, in bytes.
        weight_bytes: u64,
        /// Its workspace, in bytes.
        workspace_bytes: u64,
    },
    /// Rank 0 has sized the KV pools.
    Pool {
        /// Blocks of each.
        num_blocks: u64,
    },
    /// A rank has allocated its pool.
    Ready,
    /// The next step.
    Step(Arc<StepInput>),
    /// A step's output, from the rank that samples.
    Output {
        /// The output.
        output: StepOutput,
        /// The rank's own.
        counters: Counters,
    },
    /// Said twice a second by everybody.
    Heartbeat(Counters),
    /// The sender cannot go on, or knows of one that cannot: all must stop.
    Error {
        /// Why, at most 4096 bytes.
        reason: String,
    },
    /// Rank 0 ends in order: so does everybody.
    Shutdown,
}

/// Bytes that are no frame, or a frame that has no bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the variant names
pub enum FrameError {
    /// Somebody else's bytes.
    #[error("not a frame of Pagemill's: it begins with {found:02x?}")]
    Magic { found: [u8; 4] },
    /// Another version's frame.
    #[error("a frame of version {found}; this is version {VERSION}: all ranks must run the same Pagemill")]
    Version { found: u16 },
    /// A kind that does not exist.
    #[error("a frame of unknown kind {kind}")]
    Kind { kind: u16 },
    /// The body ends in the middle of a field.
    #[error("the frame ends within {field}: {needed} bytes needed, {left} left")]
    Truncated { field: &'static str, needed: usize, left: usize },
    /// A list or a body beyond its cap.
    #[error("{field}: {got} is more than {max}")]
    TooLong { field: &'static str, got: u64, max: u64 },
    /// A value that the field cannot have.
    #[error("{field}: {got} is no value of this field")]
    Value { field: &'static str, got: u64 },
    /// Text that is not UTF-8.
    #[error("{field}: not UTF-8")]
    Text { field: &'static str },
    /// Bytes behind the last field.
    #[error("{bytes} bytes behind the frame's last field")]
    Trailing { bytes: usize },
}

const HELLO: u16 = 1;
const WELCOME: u16 = 2;
const LOADED: u16 = 3;
const POOL: u16 = 4;
const READY: u16 = 5;
const STEP: u16 = 6;
const OUTPUT: u16 = 7;
const HEARTBEAT: u16 = 8;
const ERROR: u16 = 9;
const SHUTDOWN: u16 = 10;

/// A header that was understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    kind: u16,
    /// Bytes of the body.
    pub body_bytes: usize,
}

impl Header {
    /// Reads a header whose body may have `max_body_bytes` at most.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8; HEADER_BYTES], max_body_bytes: usize) -> Result<Self, FrameError> {
        let mut reader = Reader::new(bytes);
        let found = reader.array("magic")?;
        if found != MAGIC {
            return Err(FrameError::Magic { found });
        }
        let found = reader.u16("version")?;
        if found != VERSION {
            return Err(FrameError::Version { found });
        }
        let kind = reader.u16("kind")?;
        if !(HELLO..=SHUTDOWN).contains(&kind) {
            return Err(FrameError::Kind { kind });
        }
        let body_bytes = reader.u32("body")? as usize;
        let max = max_body_bytes.min(MAX_BODY_BYTES);
        if body_bytes > max {
            return Err(FrameError::TooLong { field: "body", got: body_bytes as u64, max: max as u64 });
        }
        Ok(Self { kind, body_bytes })
    }
}

impl Frame {
    /// Puts the whole frame into `bytes`, whose content goes and whose memory stays.
    ///
    /// # Errors
    /// A list beyond its cap.
    pub fn encode(&self, bytes: &mut Vec<u8>) -> Result<(), FrameError> {
        bytes.clear();
        bytes.extend_from_slice(&MAGIC);
        let mut writer = Writer::new(bytes);
        writer.u16(VERSION);
        writer.u16(self.kind());
        writer.u32(0);
        self.write_body(&mut writer)?;
        let body_bytes = bytes.len() - HEADER_BYTES;
        let too_long = || FrameError::TooLong { field: "body", got: body_bytes as u64, max: MAX_BODY_BYTES as u64 };
        if body_bytes > MAX_BODY_BYTES {
            return Err(too_long());
        }
        let length = u32::try_from(body_bytes).map_err(|_| too_long())?;
        bytes[8..HEADER_BYTES].copy_from_slice(&length.to_le_bytes());
        Ok(())
    }

    fn kind(&self) -> u16 {
        match self {
            Self::Hello(_) => HELLO,
            Self::Welcome { .. } => WELCOME,
            Self::Loaded { .. } => LOADED,
            Self::Pool { .. } => POOL,
            Self::Ready => READY,
            Self::Step(_) => STEP,
            Self::Output { .. } => OUTPUT,
            Self::Heartbeat(_) => HEARTBEAT,
            Self::Error { .. } => ERROR,
            Self::Shutdown => SHUTDOWN,
        }
    }

    fn write_body(&self, writer: &mut Writer<'_>) -> Result<(), FrameError> {
        match self {
            Self::Hello(hello) => hello.write(writer)?,
            Self::Welcome { token } => writer.bytes(token),
            Self::Loaded { available_bytes, weight_bytes, workspace_bytes } => {
                [available_bytes, weight_bytes, workspace_bytes].into_iter().for_each(|bytes| writer.u64(*bytes));
            }
            Self::Pool { num_blocks } => writer.u64(*num_blocks),
            Self::Ready | Self::Shutdown => {}
            Self::Step(step) => step::write(step, writer)?,
            Self::Output { output, counters } => {
                counters.write(writer);
                output::write(output, writer)?;
            }
            Self::Heartbeat(counters) => counters.write(writer),
            Self::Error { reason } => {
                let end = reason.floor_char_boundary(MAX_REASON_BYTES);
                writer.text("reason", &reason[..end], MAX_REASON_BYTES)?;
            }
        }
        Ok(())
    }

    /// Reads the body that `header` announced.
    ///
    /// # Errors
    /// What is wrong with it; `body` may be any bytes. Allocates no more than a small multiple of their
    /// number.
    pub fn decode(header: Header, body: &[u8]) -> Result<Self, FrameError> {
        let mut reader = Reader::new(body);
        let frame = match header.kind {
            HELLO => Self::Hello(Hello::read(&mut reader)?),
            WELCOME => Self::Welcome { token: reader.array("token")? },
            LOADED => Self::Loaded {
                available_bytes: reader.u64("available_bytes")?,
                weight_bytes: reader.u64("weight_bytes")?,
                workspace_bytes: reader.u64("workspace_bytes")?,
            },
            POOL => Self::Pool { num_blocks: reader.u64("num_blocks")? },
            READY => Self::Ready,
            STEP => Self::Step(Arc::new(step::read(&mut reader)?)),
            OUTPUT => {
                let counters = Counters::read(&mut reader)?;
                Self::Output { output: output::read(&mut reader)?, counters }
            }
            HEARTBEAT => Self::Heartbeat(Counters::read(&mut reader)?),
            ERROR => Self::Error { reason: reader.text("reason", MAX_REASON_BYTES)? },
            SHUTDOWN => Self::Shutdown,
            kind => return Err(FrameError::Kind { kind }),
        };
        reader.finish()?;
        Ok(frame)
    }

    /// Reads one whole frame.
    ///
    /// # Errors
    /// As [`Frame::decode`], and bytes behind the frame.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, FrameError> {
        let Some((header, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return Err(FrameError::Truncated { field: "header", needed: HEADER_BYTES, left: bytes.len() });
        };
        let header = Header::decode(header, MAX_BODY_BYTES)?;
        match body.len().checked_sub(header.body_bytes) {
            Some(0) => Self::decode(header, body),
            Some(bytes) => Err(FrameError::Trailing { bytes }),
            None => Err(FrameError::Truncated { field: "body", needed: header.body_bytes, left: body.len() }),
        }
    }
}

impl Hello {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), FrameError> {
        writer.bytes(&self.token);
        writer.u32(self.world_size);
        writer.u32(self.rank);
        writer.bytes(&self.fingerprint);
        writer.flag(self.gpu.is_some());
        if let Some(Gpu { uuid, is_shared }) = &self.gpu {
            writer.bytes(uuid);
            writer.flag(*is_shared);
        }
        writer.text("host", &self.host, MAX_HOST_BYTES)
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        Ok(Self {
            token: reader.array("token")?,
            world_size: reader.u32("world_size")?,
            rank: reader.u32("rank")?,
            fingerprint: reader.array("fingerprint")?,
            gpu: reader.flag("gpu")?.then(|| Gpu::read(reader)).transpose()?,
            host: reader.text("host", MAX_HOST_BYTES)?,
        })
    }
}

impl Gpu {
    fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        Ok(Self { uuid: reader.array("gpu.uuid")?, is_shared: reader.flag("gpu.is_shared")? })
    }
}

impl Counters {
    fn write(self, writer: &mut Writer<'_>) {
        writer.u64(self.busy_us);
        writer.u64(self.workspace_grown);
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        Ok(Self { busy_us: reader.u64("busy_us")?, workspace_grown: reader.u64("workspace_grown")? })
    }
}
