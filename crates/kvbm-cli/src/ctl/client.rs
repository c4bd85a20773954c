//! One call over a Unix socket or HTTP.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use kvbm::http::{Connection, DeadlineStream, HttpError, TlsClient, TlsError};
use kvbm::plan::deadline_after;
use serde_json::Value;

use super::ConnectArgs;
use crate::args::WrongUsage;
use crate::features::command_with;

/// Time to connect over TCP.
const CONNECT_TIME: Duration = Duration::from_secs(5);
/// Bytes of an answer.
const MAX_ANSWER: u64 = 64 << 20;
/// Bytes of a token.
const MAX_TOKEN: u64 = 4096;
/// The variable that names the socket, in the configuration of the manager as here.
const VARIABLE: &str = "KVBM_ADMIN_SOCKET";

/// Calls one manager.
pub(super) struct Client {
    to: Target,
}

enum Target {
    Unix(PathBuf),
    Tcp(TcpTarget),
}

struct TcpTarget {
    /// Host and port.
    host: String,
    token: String,
    tls: Option<TlsClient>,
}

impl Client {
    pub(super) fn new(args: &ConnectArgs) -> Result<Self> {
        let wrong = |why: &str| Err(WrongUsage(why.to_owned()).into());
        let to = match (&args.socket, &args.http, &args.token_file) {
            (Some(_), Some(_), _) => {
                return wrong("--socket and --http: a manager is called over one of them");
            }
            (_, None, Some(_)) => return wrong("--token-file goes with --http"),
            (_, None, None) if args.ca.is_some() || args.cert.is_some() => {
                return wrong("--ca, --cert and --key go with --http https://");
            }
            (None, Some(_), None) => {
                return wrong("--http needs --token-file with what admin.token_file has");
            }
            (None, Some(url), Some(file)) => {
                let (host, is_encrypted) = host_of(url)?;
                let (token, tls) = (token_of(file)?, tls_of(args, is_encrypted)?);
                Target::Tcp(TcpTarget { host, token, tls })
            }
            (Some(path), None, None) => Target::Unix(path.clone()),
            (None, None, None) => match std::env::var_os(VARIABLE) {
                Some(path) => Target::Unix(path.into()),
                None => {
                    return wrong(
                        "no manager is named: name its admin.socket with --socket PATH or in KVBM_ADMIN_SOCKET, or use --http URL --token-file FILE",
                    );
                }
            },
        };
        Ok(Self { to })
    }

    /// Makes a call; its answer, or what the manager refuses it with.
    pub(super) fn call(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
        time: Duration,
    ) -> Result<Value> {
        let body = body.map(Value::to_string).unwrap_or_default();
        let (status, text) = self.exchange(method, path, &body, time)?;
        let answer: Value = serde_json::from_str(&text)
            .with_context(|| format!("{self} answers with status {status} and no JSON: is it kvbm?"))?;
        if status == 200 {
            return Ok(answer);
        }
        let why = answer["error"].as_str().unwrap_or("no reason is given");
        bail!("{self} refuses {method} {path} (status {status}): {}", super::render::plain(why))
    }

    fn exchange(&self, method: &str, path: &str, body: &str, time: Duration) -> Result<(u16, String)> {
        let mut stream = self.connect(deadline_after(Instant::now(), time))?;
        let length = body.len();
        let authorization = match &self.to {
            Target::Unix(_) => String::new(),
            Target::Tcp(TcpTarget { token, .. }) => format!("Authorization: Bearer {token}\r\n"),
        };
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: kvbm\r\n{authorization}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        );
        // A server that refuses a call may not read all of it; its answer says why.
        let written = stream.write_all(request.as_bytes()).and_then(|()| stream.flush());
        let mut answer = Vec::new();
        let read = (&mut stream).take(MAX_ANSWER).read_to_end(&mut answer);
        if let Some(found) = parse(&answer) {
            return Ok(found);
        }
        let why = written.and(read.map(drop)).err();
        let why = why.map_or_else(|| "it closed the line".to_owned(), |error| text_of(&error, time));
        bail!("{self} does not answer {method} {path}: {why}")
    }

    fn connect(&self, until: Instant) -> Result<Box<dyn Connection>> {
        match &self.to {
            Target::Unix(path) => {
                let stream = UnixStream::connect(path).map_err(|error| {
                    let hint = match error.kind() {
                        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                            "is the manager running, with admin.socket at this path?"
                        }
                        io::ErrorKind::PermissionDenied => "call as the user that the manager runs as",
                        _ => "see the log of the manager",
                    };
                    anyhow::anyhow!("cannot connect to {}: {error}; {hint}", path.display())
                })?;
                Ok(Box::new(DeadlineStream::from(stream).until(until)))
            }
            Target::Tcp(to) => to.connect(until),
        }
    }
}

impl TcpTarget {
    fn connect(&self, until: Instant) -> Result<Box<dyn Connection>> {
        let Self { host, tls, .. } = self;
        let addrs = host.to_socket_addrs().with_context(|| format!("cannot find {host}"))?;
        let mut last = None;
        for addr in addrs {
            match TcpStream::connect_timeout(&addr, CONNECT_TIME) {
                Ok(stream) => {
                    let stream = DeadlineStream::from(stream).until(until);
                    let Some(tls) = tls else { return Ok(Box::new(stream)) };
                    let name = host.rsplit_once(':').map_or(host.as_str(), |(name, _)| name);
                    return tls.connect(name, stream).with_context(|| {
                        format!("no TLS with {host}: is --ca its authority, and admin.tls_cert set there?")
                    });
                }
                Err(error) => last = Some(error),
            }
        }
        let why = last.map_or_else(|| "it has no address".to_owned(), |error| error.to_string());
        bail!("cannot connect to {host}: {why}; is the manager running, with admin.http there?")
    }
}

impl std::fmt::Display for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.to {
            Target::Unix(path) => write!(f, "the manager at {}", path.display()),
            Target::Tcp(TcpTarget { host, tls: None, .. }) => write!(f, "the manager at http://{host}"),
            Target::Tcp(TcpTarget { host, .. }) => write!(f, "the manager at https://{host}"),
        }
    }
}

fn text_of(error: &io::Error, time: Duration) -> String {
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => format!("not within {} s", time.as_secs()),
        _ => error.to_string(),
    }
}

/// Host and port of an address, and whether it says `https`.
fn host_of(url: &str) -> Result<(String, bool)> {
    let wrong = |why: &str| WrongUsage(format!("--http {url}: {why}"));
    let (host, is_encrypted) = match (url.strip_prefix("http://"), url.strip_prefix("https://")) {
        (Some(host), _) => (host, false),
        (_, Some(host)) => (host, true),
        _ => return Err(wrong("write it like http://127.0.0.1:9401 or https://node1:9401").into()),
    };
    let host = host.trim_end_matches('/');
    let port = host.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    if port.is_none() || host.contains(['/', '@', '?']) || host.contains(char::is_whitespace) {
        return Err(wrong("write it like http://127.0.0.1:9401, with a port and without a path").into());
    }
    Ok((host.to_owned(), is_encrypted))
}

/// Whom to trust, where the address says `https`.
fn tls_of(args: &ConnectArgs, is_encrypted: bool) -> Result<Option<TlsClient>> {
    let wrong = |why: &str| Err(WrongUsage(why.to_owned()).into());
    match (&args.ca, is_encrypted) {
        (None, false) if args.cert.is_none() => Ok(None),
        (_, false) => wrong("--ca, --cert and --key go with --http https://"),
        (None, true) => wrong(
            "https:// needs --ca FILE with the authority of the manager's certificate; those of the system are often in /etc/ssl/certs/ca-certificates.crt",
        ),
        (Some(ca), true) => {
            let identity = args.cert.as_deref().zip(args.key.as_deref());
            match TlsClient::new(ca, identity) {
                Ok(tls) => Ok(Some(tls)),
                Err(error @ HttpError::Tls(TlsError::NoTls)) => bail!("{error}: {}", command_with("tls")),
                Err(error) => bail!("--{error}"),
            }
        }
    }
}

fn token_of(file: &Path) -> Result<String> {
    let mut text = String::new();
    let read = std::fs::File::open(file).and_then(|file| file.take(MAX_TOKEN).read_to_string(&mut text));
    read.with_context(|| format!("cannot read the token of {}", file.display()))?;
    let token = text.trim();
    // Anything else would end the header.
    anyhow::ensure!(
        !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic()),
        "{}: it has no token, or one with spaces or control characters",
        file.display()
    );
    Ok(token.to_owned())
}

/// Status and body of a whole answer.
fn parse(bytes: &[u8]) -> Option<(u16, String)> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&bytes[..end]).ok()?;
    let mut lines = head.split("\r\n");
    let status = lines.next()?.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    let length = lines.filter_map(|line| line.split_once(':')).find_map(|(name, value)| {
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())
    })??;
    let body = bytes.get(end + 4..)?.get(..length)?;
    Some((status, String::from_utf8(body.to_vec()).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_port_and_no_secret() {
        assert_eq!(host_of("http://127.0.0.1:9401/").unwrap(), ("127.0.0.1:9401".into(), false));
        assert_eq!(host_of("https://[::1]:80").unwrap(), ("[::1]:80".into(), true));
        for (url, why) in [
            ("https://a", "with a port"),
            ("127.0.0.1:1", "write it like"),
            ("http://a", "with a port"),
            ("http://user:secret@a:1", "without a path"),
            ("http://a:1/x", "without a path"),
            ("http://a:1\r\nX", "without a path"),
        ] {
            let error = host_of(url).unwrap_err().to_string();
            assert!(error.contains(why), "{url}: {error}");
        }
    }

    #[test]
    fn an_answer_that_is_cut_off_is_none() {
        let whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
        assert_eq!(parse(whole), Some((200, "{}".to_owned())));
        for end in 0..whole.len() {
            assert_eq!(parse(&whole[..end]), None, "{end}");
        }
        assert_eq!(parse(b"HTTP/1.1 x OK\r\nContent-Length: 0\r\n\r\n"), None);
        assert_eq!(parse(b"SSH-2.0-OpenSSH\r\n\r\n"), None);
    }
}
