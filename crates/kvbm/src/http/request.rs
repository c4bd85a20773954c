//! Reading a request.

use super::connection::{Connection, TLS_HANDSHAKE};
use super::limits::HttpLimits;
use super::response::HttpResponse;
use std::fmt;
use std::io;

/// What a client asks.
#[derive(Default, PartialEq, Eq)]
pub struct HttpRequest {
    /// GET, POST and so on.
    pub method: String,
    /// Without the question mark and what follows.
    pub path: String,
    /// What follows the question mark.
    pub query: String,
    /// The value of the header `Authorization`.
    pub authorization: Option<String>,
    /// The body.
    pub body: Vec<u8>,
}

/// Without the token of a client, and without the body.
impl fmt::Debug for HttpRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { method, path, query, authorization, body } = self;
        let authorization = authorization.as_ref().map(|_| "...");
        f.debug_struct("HttpRequest")
            .field("method", method)
            .field("path", path)
            .field("query", query)
            .field("authorization", &authorization)
            .field("body_bytes", &body.len())
            .finish()
    }
}

/// The head of a request, and what it says of the body.
#[derive(Debug, Default)]
struct Head {
    request: HttpRequest,
    length: usize,
    /// Whether the client waits for leave to send the body.
    waits: bool,
}

/// A request, or what to answer to what is none. `admit` sees the head before the body is read.
pub(super) fn read(
    stream: &mut dyn Connection,
    limits: &HttpLimits,
    admit: &dyn Fn(&HttpRequest) -> Result<(), HttpResponse>,
) -> io::Result<Result<HttpRequest, HttpResponse>> {
    let mut bytes = Vec::new();
    let end = loop {
        // Before the search for the end of the head: the answer must not depend on packets.
        if bytes.first() == Some(&TLS_HANDSHAKE) {
            return Ok(Err(HttpResponse::error(400, "this server speaks no TLS: use http://")));
        }
        let found = bytes.windows(4).position(|window| window == b"\r\n\r\n");
        if let Some(end) = found.filter(|end| *end <= limits.head_bytes) {
            break end;
        }
        if bytes.len() > limits.head_bytes {
            let text = format!("the request head is longer than {} bytes", limits.head_bytes);
            return Ok(Err(HttpResponse::error(431, &text)));
        }
        more(stream, &mut bytes)?;
    };
    let body = bytes.split_off(end + 4);
    let Head { mut request, length, waits } = match head(&bytes) {
        Ok(head) => head,
        Err(response) => return Ok(Err(response)),
    };
    if let Err(response) = admit(&request) {
        return Ok(Err(response));
    }
    if length > limits.body_bytes {
        let text = format!("a body of {length} bytes: at most {} are taken", limits.body_bytes);
        return Ok(Err(HttpResponse::error(413, &text)));
    }
    request.body = body;
    if waits && request.body.len() < length {
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
    }
    while request.body.len() < length {
        more(stream, &mut request.body)?;
    }
    request.body.truncate(length);
    Ok(Ok(request))
}

fn more(stream: &mut dyn Connection, bytes: &mut Vec<u8>) -> io::Result<()> {
    let mut chunk = [0; 4096];
    match stream.read(&mut chunk)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        n => {
            bytes.extend_from_slice(&chunk[..n]);
            Ok(())
        }
    }
}

fn head(bytes: &[u8]) -> Result<Head, HttpResponse> {
    let bad = |what: &str| HttpResponse::error(400, what);
    let text = std::str::from_utf8(bytes).map_err(|_| bad("the request head is not text"))?;
    let mut lines = text.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(version)) = (words.next(), words.next(), words.next()) else {
        return Err(bad("the request line is not METHOD TARGET VERSION"));
    };
    if !version.starts_with("HTTP/1.") {
        return Err(bad("only HTTP/1.1 is supported"));
    }
    let mut head = Head::default();
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        let value = value.trim();
        if name.eq_ignore_ascii_case("content-length") {
            head.length = value.parse().map_err(|_| bad("Content-Length is not a number"))?;
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(HttpResponse::error(501, "send the body with a Content-Length"));
        } else if name.eq_ignore_ascii_case("authorization") {
            head.request.authorization = Some(value.to_owned());
        } else if name.eq_ignore_ascii_case("expect") {
            head.waits = value.eq_ignore_ascii_case("100-continue");
        }
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let request = &mut head.request;
    (request.method, request.path, request.query) = (method.to_owned(), path.to_owned(), query.to_owned());
    Ok(head)
}
