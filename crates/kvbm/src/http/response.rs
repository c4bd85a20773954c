//! An answer.

use std::io::{self, Write};

/// An answer to a request.
#[derive(Debug, PartialEq, Eq)]
pub struct HttpResponse {
    /// 200, 404 and so on.
    pub status: u16,
    /// Media type of the body.
    pub content_type: &'static str,
    /// Further headers, each with its end of line.
    pub headers: &'static str,
    /// The body.
    pub body: String,
}

impl HttpResponse {
    /// Plain text.
    pub fn text(status: u16, body: impl Into<String>) -> Self {
        Self { status, content_type: "text/plain; charset=utf-8", headers: "", body: body.into() }
    }

    /// A JSON value and an end of line.
    pub fn json(status: u16, body: &serde_json::Value) -> Self {
        Self { status, content_type: "application/json", headers: "", body: format!("{body}\n") }
    }

    /// An error as JSON: `{"error": message}`.
    pub fn error(status: u16, message: &str) -> Self {
        Self::json(status, &serde_json::json!({ "error": message }))
    }

    /// Writes it; of the answer to HEAD the head alone.
    pub(super) fn write(&self, to: &mut dyn Write, head_only: bool) -> io::Result<()> {
        let Self { status, content_type, headers, body } = self;
        let length = body.len();
        write!(
            to,
            "HTTP/1.1 {status} {}\r\nContent-Type: {content_type}\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n",
            reason(*status)
        )?;
        if !head_only {
            to.write_all(body.as_bytes())?;
        }
        to.flush()
    }
}

const fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        409 => "Conflict",
        413 => "Content Too Large",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        _ => "Bad Request",
    }
}
