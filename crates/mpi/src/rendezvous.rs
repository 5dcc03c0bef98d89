//! How a world's processes find and recognise each other: rank 0 opens a door and invites, the others knock
//! and say who they are. Decides who belongs to the world; what they do together is `leader`'s and
//! `follower`'s.

use crate::addresses::{host_name, local_addresses};
use crate::error::{LinkError, ProcessError};
use crate::frame::{Fingerprint, Frame, Gpu, Hello, MAX_HELLO_BYTES, Token};
use crate::link::{FrameReceiver, FrameSender, LOST_AFTER, split};
use std::io::{self, ErrorKind, Read};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};
use subtle::ConstantTimeEq;

pub use crate::frame::Invitation;

/// How long rank 0 waits for the others, and they for it.
const GATHERING: Duration = Duration::from_secs(60);
/// How long a connection may take to come about.
const CONNECTING: Duration = Duration::from_secs(1);
/// How long a connection may take to say who it is: one that does not holds up the others so long.
const GREETING: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(5);

/// Who a process is, and what it is about to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankIdentity {
    /// Its rank.
    pub rank: usize,
    /// Ranks in all.
    pub world_size: usize,
    /// Of model and configuration: must be the same on all ranks.
    pub fingerprint: Fingerprint,
    /// Its GPU; none on the CPU.
    pub gpu: Option<Gpu>,
}

/// Rank 0's door.
pub struct Reception {
    listener: TcpListener,
    invitation: Invitation,
}

/// A rank that came in.
pub(crate) struct Admitted {
    pub(crate) hello: Hello,
    pub(crate) sender: FrameSender,
    pub(crate) receiver: FrameReceiver,
}

/// Why somebody was not let in.
enum Turned {
    /// Does not belong to this world.
    Away,
    /// Belongs to it, but cannot work with it.
    Down(ProcessError),
}

impl Reception {
    /// Listens on `port` of all addresses of this host; 0: any free port.
    ///
    /// # Errors
    /// The port cannot be had.
    pub fn open(port: u16) -> Result<Self, ProcessError> {
        let system = |source| ProcessError::System { what: "opening the ranks' port", source };
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
            .map_err(system)?;
        listener.set_nonblocking(true).map_err(system)?;
        let port = listener.local_addr().map_err(system)?.port();
        let addresses = local_addresses().into_iter().map(|ip| SocketAddr::new(ip, port)).collect();
        let (token, answer) = random_tokens().map_err(system)?;
        Ok(Self { listener, invitation: Invitation { addresses, token, answer } })
    }

    /// For the other ranks, and nobody else.
    #[must_use]
    pub fn invitation(&self) -> &Invitation {
        &self.invitation
    }

    /// Lets in all other ranks of `own`'s world, in rank order, and closes the door.
    ///
    /// # Errors
    /// A rank that did not come within a minute, or that loads something else; those who came are told.
    pub(crate) fn admit(self, own: &RankIdentity) -> Result<Vec<Admitted>, ProcessError> {
        let deadline = Instant::now() + GATHERING;
        let mut seats: Vec<Option<Admitted>> = (1..own.world_size).map(|_| None).collect();
        while seats.iter().any(Option::is_none) {
            let seated = match self.listener.accept() {
                Ok((stream, _)) => self.greet(stream, own, &seats).map(|admitted| take_seat(&mut seats, admitted)),
                Err(error) if error.kind() != ErrorKind::WouldBlock => continue,
                Err(_) if Instant::now() < deadline => {
                    std::thread::sleep(POLL);
                    continue;
                }
                Err(_) => Err(Turned::Down(self.late(&seats))),
            };
            if let Err(Turned::Down(error)) = seated.and_then(std::convert::identity) {
                let reason = error.to_string();
                for admitted in seats.iter().flatten() {
                    // Whoever is gone has ended already.
                    let _ = admitted.sender.send(&Frame::Error { reason: reason.clone() });
                }
                return Err(error);
            }
        }
        Ok(seats.into_iter().flatten().collect())
    }

    /// `seats` are those who came before.
    fn greet(&self, stream: TcpStream, own: &RankIdentity, seats: &[Option<Admitted>]) -> Result<Admitted, Turned> {
        let open = || -> io::Result<_> {
            stream.set_nonblocking(false)?;
            let halves = split(stream)?;
            halves.1.set_timeout(GREETING)?;
            Ok(halves)
        };
        let (sender, mut receiver) = open().map_err(|_| Turned::Away)?;
        let Ok(Frame::Hello(hello)) = receiver.receive_limited(MAX_HELLO_BYTES) else { return Err(Turned::Away) };
        if !bool::from(hello.token.ct_eq(&self.invitation.token)) {
            return Err(Turned::Away);
        }
        let gpus = seats.iter().flatten().map(|seated| (seated.hello.rank, seated.hello.gpu));
        let gpus = [(0, own.gpu)].into_iter().chain(gpus);
        if let Some(detail) = difference(&hello, own).or_else(|| same_gpu(hello.gpu, gpus)) {
            let error = ProcessError::Mismatch { rank: hello.rank, host: hello.host, detail };
            // It prints the same; if it is gone, that is its end.
            let _ = sender.send(&Frame::Error { reason: error.to_string() });
            return Err(Turned::Down(error));
        }
        let welcome = Frame::Welcome { token: self.invitation.answer };
        let greeted = sender.send(&welcome).is_ok() && receiver.set_timeout(LOST_AFTER).is_ok();
        if greeted { Ok(Admitted { hello, sender, receiver }) } else { Err(Turned::Away) }
    }

    fn late(&self, seats: &[Option<Admitted>]) -> ProcessError {
        let missing: Vec<String> =
            (1..).zip(seats).filter(|(_, seat)| seat.is_none()).map(|(rank, _): (usize, _)| rank.to_string()).collect();
        let port = self.invitation.addresses.first().map_or(0, SocketAddr::port);
        let what = format!("rank {} did not connect to port {port} of {}", missing.join(", "), host_name());
        ProcessError::Late { what, seconds: GATHERING.as_secs() }
    }
}

fn take_seat(seats: &mut [Option<Admitted>], admitted: Admitted) -> Result<(), Turned> {
    let (rank, host) = (admitted.hello.rank, admitted.hello.host.clone());
    let seat = (rank as usize).checked_sub(1).and_then(|at| seats.get_mut(at));
    match seat {
        Some(seat) if seat.is_none() => {
            *seat = Some(admitted);
            Ok(())
        }
        _ => Err(Turned::Down(ProcessError::Mismatch { rank, host, detail: "is there twice".into() })),
    }
}

/// What keeps a process of this world from working with rank 0.
fn difference(hello: &Hello, own: &RankIdentity) -> Option<String> {
    if hello.world_size as usize != own.world_size {
        return Some(format!("is one of {} ranks, rank 0 one of {}", hello.world_size, own.world_size));
    }
    if hello.rank == 0 || hello.rank >= hello.world_size {
        return Some(format!("has no place among {} ranks", hello.world_size));
    }
    if hello.gpu.is_some() != own.gpu.is_some() {
        let device = |gpu: Option<Gpu>| if gpu.is_some() { "a GPU" } else { "the CPU" };
        return Some(format!(
            "runs on {}, rank 0 on {}: name the device (--device)",
            device(hello.gpu),
            device(own.gpu)
        ));
    }
    (hello.fingerprint != own.fingerprint)
        .then(|| "loads another model file, or has other settings, than rank 0: both must be the same".to_owned())
}

/// That a rank has the GPU of one of those before it, which is not meant for both.
fn same_gpu(gpu: Option<Gpu>, others: impl Iterator<Item = (u32, Option<Gpu>)>) -> Option<String> {
    let gpu = gpu?;
    let mut same = others.filter_map(|(rank, other)| other.filter(|other| other.uuid == gpu.uuid).zip(Some(rank)));
    let (_, rank) = same.find(|(other, _)| !(gpu.is_shared && other.is_shared))?;
    Some(format!(
        "has the same GPU as rank {rank}, {}: start as many processes on a host as it has GPUs, or name one for each of \
         them (--device cuda:0,1; with cuda:0,0 two share one, to try a layout out)",
        gpu.name()
    ))
}

/// Finds rank 0 and says who this process is.
///
/// # Errors
/// No address answered within a minute; rank 0's refusal.
pub(crate) fn knock(invitation: &Invitation, own: &RankIdentity) -> Result<(FrameSender, FrameReceiver), ProcessError> {
    let deadline = Instant::now() + GATHERING;
    let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    let hello = Frame::Hello(Hello {
        token: invitation.token,
        world_size: number(own.world_size),
        rank: number(own.rank),
        fingerprint: own.fingerprint,
        gpu: own.gpu,
        host: host_name(),
    });
    loop {
        for address in &invitation.addresses {
            if let Some(outcome) = knock_at(address, &hello, &invitation.answer) {
                return outcome;
            }
        }
        if Instant::now() >= deadline {
            let tried: Vec<String> = invitation.addresses.iter().map(ToString::to_string).collect();
            let what = format!("rank 0 could not be reached from {} at {}", host_name(), tried.join(", "));
            return Err(ProcessError::Late { what, seconds: GATHERING.as_secs() });
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// `None`: nobody there, or somebody else.
fn knock_at(
    address: &SocketAddr,
    hello: &Frame,
    answer: &Token,
) -> Option<Result<(FrameSender, FrameReceiver), ProcessError>> {
    let stream = TcpStream::connect_timeout(address, CONNECTING).ok()?;
    let (sender, mut receiver) = split(stream).ok()?;
    sender.send(hello).ok()?;
    // Rank 0 greets one after the other.
    receiver.set_timeout(GATHERING).ok()?;
    match receiver.receive_limited(MAX_BODY_OF_ANSWER) {
        Ok(Frame::Welcome { token }) if bool::from(token.ct_eq(answer)) => {
            receiver.set_timeout(LOST_AFTER).ok()?;
            Some(Ok((sender, receiver)))
        }
        Ok(Frame::Error { reason }) => Some(Err(ProcessError::Lost { reason })),
        Ok(_) | Err(LinkError::Closed | LinkError::Silent(_) | LinkError::Frame(_) | LinkError::Io(_)) => None,
    }
}

/// An error's reason, or a token.
const MAX_BODY_OF_ANSWER: usize = 8192;

fn random_tokens() -> io::Result<(Token, Token)> {
    let mut source = std::fs::File::open("/dev/urandom")?;
    let (mut token, mut answer) = (Token::default(), Token::default());
    source.read_exact(&mut token)?;
    source.read_exact(&mut answer)?;
    Ok((token, answer))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Write;

    fn identity(rank: usize) -> RankIdentity {
        RankIdentity { rank, world_size: 3, fingerprint: [7; 32], gpu: None }
    }

    #[test]
    fn strangers_are_turned_away_and_ranks_come_in_in_order() {
        let reception = Reception::open(0).unwrap();
        let invitation = reception.invitation().clone();
        let door = *invitation.addresses.last().unwrap();
        std::thread::scope(|scope| {
            let admitted = scope.spawn(move || reception.admit(&identity(0)));
            let mut stranger = TcpStream::connect(door).unwrap();
            stranger.write_all(b"GET /health HTTP/1.1\r\n\r\n").unwrap();
            let guess = Invitation { token: [0; 16], addresses: vec![door], ..invitation.clone() };
            let (sender, mut receiver) = split(TcpStream::connect(door).unwrap()).unwrap();
            let Frame::Hello(hello) = hello_of(&guess, 1) else { unreachable!() };
            sender.send(&Frame::Hello(hello)).unwrap();
            assert!(receiver.receive().is_err());
            let second = scope.spawn(|| knock(&invitation, &identity(2)).is_ok());
            assert!(knock(&invitation, &identity(1)).is_ok());
            assert!(second.join().unwrap());
            let admitted = admitted.join().unwrap().unwrap();
            assert_eq!(admitted.iter().map(|rank| rank.hello.rank).collect::<Vec<_>>(), [1, 2]);
        });
    }

    fn hello_of(invitation: &Invitation, rank: u32) -> Frame {
        Frame::Hello(Hello {
            token: invitation.token,
            world_size: 3,
            rank,
            fingerprint: [7; 32],
            gpu: None,
            host: "test".into(),
        })
    }

    #[test]
    fn a_gpu_is_one_ranks_unless_it_is_meant_for_several() {
        let gpu = |number: u8, is_shared| Some(Gpu { uuid: [number; 16], is_shared });
        let check = |gpu, others: &[Option<Gpu>]| same_gpu(gpu, (0..).zip(others.iter().copied()));
        assert_eq!(check(None, &[None, None]), None);
        assert_eq!(check(gpu(1, false), &[gpu(0, false), gpu(2, false)]), None);
        assert_eq!(check(gpu(1, true), &[gpu(1, true), gpu(1, true)]), None);
        for (own, other) in [(false, false), (false, true), (true, false)] {
            let detail = check(gpu(0xab, own), &[gpu(2, false), gpu(0xab, other)]).unwrap();
            assert!(detail.contains("the same GPU as rank 1, GPU-abababab-abab-abab-abab-abababababab"), "{detail}");
        }
        // At the door.
        let with_gpu = |rank| RankIdentity { gpu: gpu(7, false), ..identity(rank) };
        for (wrong, part) in
            [(with_gpu(1), "has the same GPU as rank 0"), (identity(2), "runs on the CPU, rank 0 on a GPU")]
        {
            assert_refused(with_gpu(0), &wrong, part);
        }
    }

    #[test]
    fn another_model_or_place_is_refused_on_both_sides() {
        let other = RankIdentity { fingerprint: [8; 32], ..identity(1) };
        let larger = RankIdentity { world_size: 4, ..identity(1) };
        for (wrong, part) in [(other, "loads another model file"), (larger, "is one of 4 ranks, rank 0 one of 3")] {
            assert_refused(identity(0), &wrong, part);
        }
    }

    /// Both sides hear why.
    fn assert_refused(own: RankIdentity, wrong: &RankIdentity, part: &str) {
        let reception = Reception::open(0).unwrap();
        let invitation = reception.invitation().clone();
        std::thread::scope(|scope| {
            let admitted = scope.spawn(move || reception.admit(&own));
            let Err(far) = knock(&invitation, wrong) else { panic!("was let in") };
            let Err(near) = admitted.join().unwrap() else { panic!("let it in") };
            assert!(far.to_string().contains(part), "{far}");
            assert_eq!(far.to_string(), near.to_string());
        });
    }
}
