//! How the other ranks find rank 0's door: its addresses, its port, and the two tokens by which both sides
//! know each other. Travels by MPI, so only processes of this world have it.

use super::fields::{Reader, Writer};
use super::{FrameError, MAGIC, Token, VERSION};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Addresses at most.
pub const MAX_ADDRESSES: usize = 32;
/// Bytes of an encoded invitation at most.
pub const MAX_INVITATION_BYTES: usize = 1024;

/// Rank 0's invitation to the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invitation {
    /// Where rank 0 may be reached, in the order to try them.
    pub addresses: Vec<SocketAddr>,
    /// To be shown to rank 0.
    pub token: Token,
    /// To be shown by rank 0.
    pub answer: Token,
}

impl Invitation {
    /// The invitation as bytes.
    ///
    /// # Errors
    /// Too many addresses.
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let mut bytes = Vec::with_capacity(MAX_INVITATION_BYTES);
        let mut writer = Writer::new(&mut bytes);
        writer.bytes(&MAGIC);
        writer.u16(VERSION);
        writer.count("addresses", self.addresses.len(), MAX_ADDRESSES)?;
        for address in &self.addresses {
            let ip = match address.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            writer.bytes(&ip.octets());
            writer.u16(address.port());
        }
        writer.bytes(&self.token);
        writer.bytes(&self.answer);
        Ok(bytes)
    }

    /// Reads an invitation.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut reader = Reader::new(bytes);
        let found = reader.array("magic")?;
        if found != MAGIC {
            return Err(FrameError::Magic { found });
        }
        let found = reader.u16("version")?;
        if found != VERSION {
            return Err(FrameError::Version { found });
        }
        let addresses = reader.list("addresses", MAX_ADDRESSES, 18, |reader| {
            let ip = Ipv6Addr::from(reader.array::<16>("address")?).to_canonical();
            Ok(SocketAddr::new(ip, reader.u16("port")?))
        })?;
        let (token, answer) = (reader.array("token")?, reader.array("answer")?);
        reader.finish()?;
        Ok(Self { addresses, token, answer })
    }
}
