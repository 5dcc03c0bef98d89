//! A server on this machine that speaks the part of the Hugging Face API that fetching a model needs, and
//! misbehaves on demand.

use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What the double serves and how it fails.
#[derive(Default)]
pub struct Behaviour {
    /// Files of the repository `owner/name`.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Names listed besides those of the files.
    pub also_listed: Vec<String>,
    /// A body instead of the listing.
    pub listing: Option<String>,
    /// A status for every request.
    pub status: Option<u16>,
    /// Downloads of a file that break off after so many bytes, one after the other.
    pub cuts: HashMap<String, VecDeque<usize>>,
    /// Header values instead of the right ones; an empty value leaves the header out.
    pub headers: HashMap<&'static str, String>,
    /// Answers ranges with the whole file and 200, except for the one-byte probe.
    pub ignores_ranges: bool,
    /// Large files come by a redirect, as from a content network.
    pub redirects: bool,
    /// `path range` of every request.
    pub requests: Vec<String>,
}

/// The running double. Its thread ends with the test process.
pub struct HubDouble {
    pub endpoint: String,
    behaviour: Arc<Mutex<Behaviour>>,
}

impl HubDouble {
    pub fn start(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let behaviour = Arc::new(Mutex::new(behaviour));
        let shared = Arc::clone(&behaviour);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                // A client that goes away in the middle is part of the play.
                std::thread::spawn(move || drop(answer(&stream, &mut shared.lock().unwrap())));
            }
        });
        Self { endpoint, behaviour }
    }

    /// Serves the files of a folder.
    pub fn of_folder(folder: &Path) -> Self {
        Self::start(Behaviour { files: files_of(folder), ..Behaviour::default() })
    }

    pub fn behaviour(&self) -> MutexGuard<'_, Behaviour> {
        self.behaviour.lock().unwrap()
    }
}

/// The files of a folder by name.
pub fn files_of(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().flatten();
    entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
}

fn answer(stream: &TcpStream, behaviour: &mut Behaviour) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let request = lines.next().unwrap_or(Ok(String::new()))?;
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut range = None;
    for line in lines {
        let line = line?;
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.to_lowercase().strip_prefix("range: bytes=") {
            let (begin, end) = value.split_once('-').unwrap();
            range = Some((begin.parse::<usize>().unwrap(), end.parse::<usize>().ok()));
        }
    }
    behaviour.requests.push(format!("{path} {range:?}"));
    if let Some(status) = behaviour.status {
        return reply(stream, status, "", b"{\"error\":\"as asked\"}", None);
    }
    if path.starts_with("/api/models/owner/name/revision/") {
        let body = behaviour.listing.clone().unwrap_or_else(|| listing(behaviour));
        return reply(stream, 200, "Content-Type: application/json\r\n", body.as_bytes(), None);
    }
    let name = path.rsplit('/').next().unwrap_or_default().to_owned();
    match behaviour.files.get(&name).cloned() {
        Some(bytes) if path.starts_with("/owner/name/resolve/") || path.starts_with("/content/") => {
            send_file(stream, behaviour, &path, &name, &bytes, range)
        }
        _ => reply(stream, 404, "", b"{\"error\":\"Entry not found\"}", None),
    }
}

fn listing(behaviour: &Behaviour) -> String {
    let names = behaviour.files.keys().chain(&behaviour.also_listed);
    let siblings: Vec<_> = names.map(|name| serde_json::json!({ "rfilename": name })).collect();
    serde_json::json!({ "sha": COMMIT, "siblings": siblings }).to_string()
}

fn send_file(
    stream: &TcpStream,
    behaviour: &mut Behaviour,
    path: &str,
    name: &str,
    bytes: &[u8],
    range: Option<(usize, Option<usize>)>,
) -> std::io::Result<()> {
    let sum = Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    });
    // As the hub does: large files carry their sum, small ones a shorter hash.
    let large = name.ends_with(".safetensors") || name.ends_with(".gguf");
    let tag = if large { format!("\"{sum}\"") } else { format!("\"{}\"", &sum[..40]) };
    let mut headers = String::from("Accept-Ranges: bytes\r\n");
    for (header, right) in [("etag", tag), ("x-repo-commit", COMMIT.to_owned())] {
        let value = behaviour.headers.get(header).cloned().unwrap_or(right);
        if !value.is_empty() {
            headers.push_str(&format!("{header}: {value}\r\n"));
        }
    }
    if behaviour.redirects && large && !path.starts_with("/content/") {
        let location = format!("http://{}/content/{name}", stream.local_addr()?);
        let location = behaviour.headers.get("location").cloned().unwrap_or(location);
        if !location.is_empty() {
            headers.push_str(&format!("Location: {location}\r\n"));
        }
        return reply(stream, 302, &headers.replace("etag:", "x-linked-etag:"), b"", None);
    }
    let probe = range == Some((0, Some(0)));
    let (begin, end) = range.unwrap_or((0, None));
    let end = end.map_or(bytes.len(), |end| (end + 1).min(bytes.len()));
    let whole = range.is_none() || (behaviour.ignores_ranges && !probe);
    if !whole && begin >= bytes.len() {
        return reply(stream, 416, &headers, b"", None);
    }
    let cut = if probe { None } else { behaviour.cuts.get_mut(name).and_then(VecDeque::pop_front) };
    if whole {
        return reply(stream, 200, &headers, bytes, cut);
    }
    let content_range = format!("bytes {begin}-{}/{}", end - 1, bytes.len());
    let content_range = behaviour.headers.get("content-range").cloned().unwrap_or(content_range);
    if !content_range.is_empty() {
        headers.push_str(&format!("Content-Range: {content_range}\r\n"));
    }
    reply(stream, 206, &headers, &bytes[begin..end], cut)
}

fn reply(mut stream: &TcpStream, status: u16, headers: &str, body: &[u8], cut: Option<usize>) -> std::io::Result<()> {
    let length = body.len();
    write!(stream, "HTTP/1.1 {status} As asked\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n")?;
    stream.write_all(&body[..cut.unwrap_or(length).min(length)])
}
