//! Streams inside a 200: server-sent events, and Amazon's [event stream](super::event_stream).
//!
//! A success is known to be one when its first *content* is there, and not before: providers send a head, some
//! a first event as well, and then "overloaded". What comes before content is
//!
//! | | before content | content |
//! |---|---|---|
//! | server-sent events | comments, `ping`, events without data | everything else, `[DONE]` too |
//! | Anthropic | `message_start`, `content_block_start` | |
//! | OpenAI, responses | `response.created`, `.queued`, `.in_progress`, `.output_item.added`, `.content_part.added` | |
//! | OpenAI, chat | a chunk whose choices have nothing but a role, or none | |
//! | Amazon | `initial-response`, `messageStart`, `contentBlockStart`; a `chunk` that holds one of the above | |

use super::{
    body::{Found, contains, of_error, of_success},
    event_stream::{self, Message, Parsed},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::Value;

/// An event that was cut in pieces is put together again up to this length.
const PIECES: usize = 16 << 10;

/// How a stream is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    ServerSent,
    Amazon,
}

impl Format {
    pub(crate) fn of(content_type: &[u8]) -> Option<Self> {
        if content_type.starts_with(b"text/event-stream") {
            Some(Format::ServerSent)
        } else if content_type.starts_with(b"application/vnd.amazon.eventstream") {
            Some(Format::Amazon)
        } else {
            None
        }
    }

    /// What the start of a stream says.
    pub(crate) fn first(self, stream: &[u8]) -> First {
        match self {
            Format::ServerSent => first_event(stream),
            Format::Amazon => first_message(stream),
        }
    }
}

/// How a stream begins.
#[derive(Debug)]
pub(crate) enum First {
    /// Nothing that counts is there yet.
    Incomplete,
    /// It has begun, and no content is there yet.
    Preamble,
    /// With content, or with something that is not understood.
    Content,
    /// With an error, which says this.
    Error(Found),
}

enum Event {
    Skipped,
    Preamble,
    Content,
    Error(Found),
}

fn first_event(stream: &[u8]) -> First {
    let mut rest = stream.strip_prefix(b"\xef\xbb\xbf").unwrap_or(stream);
    let mut first = First::Incomplete;
    while let Some((event, tail)) = split_event(rest) {
        rest = tail;
        match read(event) {
            Event::Skipped => {}
            Event::Preamble => first = First::Preamble,
            Event::Content => return First::Content,
            Event::Error(found) => return First::Error(found),
        }
    }
    first
}

fn first_message(stream: &[u8]) -> First {
    let mut rest = stream;
    let mut first = First::Incomplete;
    loop {
        match event_stream::parse(rest) {
            Parsed::Incomplete => return first,
            Parsed::Garbage => return First::Content,
            Parsed::Message(Message::Exception(kind, payload), _) => {
                return First::Error(event_stream::found(kind, payload));
            }
            Parsed::Message(Message::Event(kind, payload), length) => {
                let whole = rest.get(length..);
                match kind {
                    b"initial-response" | b"messageStart" | b"contentBlockStart" => {}
                    b"chunk" if whole.is_none() => return first,
                    b"chunk" if is_preamble_chunk(payload) => {}
                    _ => return First::Content,
                }
                first = First::Preamble;
                match whole {
                    Some(tail) => rest = tail,
                    None => return first,
                }
            }
        }
    }
}

/// Amazon's envelope of a model's own events: their JSON in base64.
fn is_preamble_chunk(payload: &[u8]) -> bool {
    let inner = || {
        let json: Value = serde_json::from_slice(payload).ok()?;
        BASE64_STANDARD.decode(json.get("bytes")?.as_str()?).ok()
    };
    inner().is_some_and(|event| is_preamble(b"", &event))
}

/// An error event anywhere in `events`; one that is not complete counts too.
pub(crate) fn error_event(events: &[u8]) -> Option<Found> {
    if !contains(events, b"error") {
        return None;
    }
    let mut rest = events;
    while !rest.is_empty() {
        let (event, tail) = split_event(rest).unwrap_or((rest, b""));
        rest = tail;
        if let Event::Error(found) = read(event) {
            return Some(found);
        }
    }
    None
}

/// The first event of `stream` with its lines, and what follows the blank line that ends it.
fn split_event(stream: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut at = 0;
    let mut line_is_empty = true;
    while at < stream.len() {
        let ends = match stream[at] {
            b'\r' if stream.get(at + 1) == Some(&b'\n') => 2,
            b'\r' | b'\n' => 1,
            _ => 0,
        };
        if ends == 0 {
            line_is_empty = false;
            at += 1;
            continue;
        }
        if line_is_empty {
            return Some((&stream[..at], &stream[at + ends..]));
        }
        line_is_empty = true;
        at += ends;
    }
    None
}

fn read(event: &[u8]) -> Event {
    let (mut name, mut data) = (&b""[..], Vec::new());
    for line in event.split(|byte| matches!(byte, b'\n' | b'\r')) {
        let field = |field: &[u8]| {
            let value = line.strip_prefix(field)?.strip_prefix(b":")?;
            Some(value.strip_prefix(b" ").unwrap_or(value))
        };
        if let Some(value) = field(b"event") {
            name = value;
        } else if let Some(value) = field(b"data") {
            data.extend_from_slice(value);
            data.push(b'\n');
        }
    }
    if name == b"ping" || data.trim_ascii().is_empty() && name != b"error" {
        return Event::Skipped;
    }
    if name == b"error" {
        return Event::Error(of_success(&data).unwrap_or_else(|| of_error(&data)));
    }
    match of_success(&data) {
        Some(found) => Event::Error(found),
        None if is_preamble(name, &data) => Event::Preamble,
        None => Event::Content,
    }
}

/// Whether an event begins a stream and says nothing yet. It need not name its type outside of its data.
fn is_preamble(name: &[u8], data: &[u8]) -> bool {
    let is_begin = |name: &[u8]| {
        matches!(
            name,
            b"message_start"
                | b"content_block_start"
                | b"response.created"
                | b"response.queued"
                | b"response.in_progress"
                | b"response.output_item.added"
                | b"response.content_part.added"
        )
    };
    if is_begin(name) {
        return true;
    }
    let Ok(Value::Object(event)) = serde_json::from_slice(data) else { return false };
    match (event.get("type"), event.get("choices")) {
        (Some(Value::String(kind)), _) => kind == "ping" || is_begin(kind.as_bytes()),
        (_, Some(Value::Array(choices))) => {
            event.get("usage").is_none_or(Value::is_null) && choices.iter().all(is_empty_choice)
        }
        _ => false,
    }
}

/// A choice of a chat chunk that tells whose turn it is, at most.
fn is_empty_choice(choice: &Value) -> bool {
    let is_nothing = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    };
    choice.get("finish_reason").is_none_or(Value::is_null)
        && choice
            .get("delta")
            .and_then(Value::as_object)
            .is_some_and(|delta| delta.iter().all(|(member, value)| member == "role" || is_nothing(value)))
}

/// Looks for an error in a stream that has been handed out.
#[derive(Debug)]
pub(crate) struct Late {
    format: Format,
    /// Server-sent: the begin of an event whose end has not come. Amazon: of a message.
    piece: Vec<u8>,
    /// What is left of a message, or (server-sent: any number) of an event, that is passed over.
    skip: usize,
}

impl Late {
    pub(crate) fn new(format: Format) -> Box<Self> {
        Box::new(Late { format, piece: Vec::new(), skip: 0 })
    }

    /// The next bytes of the stream.
    pub(crate) fn look(&mut self, bytes: &[u8]) -> Option<Found> {
        match self.format {
            Format::ServerSent => self.look_at_events(bytes),
            Format::Amazon => self.look_at_messages(bytes),
        }
    }

    /// The stream is over: a last event may lack its blank line.
    pub(crate) fn end(&mut self) -> Option<Found> {
        match self.format {
            Format::ServerSent => error_event(&std::mem::take(&mut self.piece)),
            Format::Amazon => None,
        }
    }

    fn look_at_events(&mut self, bytes: &[u8]) -> Option<Found> {
        let mut bytes = bytes;
        if self.skip > 0 {
            // Some blank line ends what was too long. (One that is cut in two is passed over with the next.)
            (_, bytes) = split_event(bytes)?;
            self.skip = 0;
        }
        // Mostly, events come whole, and then nothing is copied.
        let is_whole = self.piece.is_empty() && (bytes.ends_with(b"\n\n") || bytes.ends_with(b"\r\n\r\n"));
        if is_whole {
            return error_event(bytes);
        }
        self.piece.extend_from_slice(bytes);
        let mut rest = &*self.piece;
        let mut found = None;
        while let (Some((event, tail)), None) = (split_event(rest), &found) {
            found = error_event(event);
            rest = tail;
        }
        let read = self.piece.len() - rest.len();
        self.piece.drain(..read);
        if self.piece.len() > PIECES {
            self.skip = 1;
            self.piece = Vec::new();
        }
        found
    }

    fn look_at_messages(&mut self, bytes: &[u8]) -> Option<Found> {
        let passed = self.skip.min(bytes.len());
        self.skip -= passed;
        self.piece.extend_from_slice(&bytes[passed..]);
        let (mut at, mut found) = (0, None);
        while found.is_none() && self.skip == 0 {
            match event_stream::parse(&self.piece[at..]) {
                Parsed::Message(message, length) => {
                    if let Message::Exception(kind, payload) = message {
                        found = Some(event_stream::found(kind, payload));
                    }
                    let there = length.min(self.piece.len() - at);
                    self.skip = length - there;
                    at += there;
                }
                // Where it is not understood, nothing more is said of it.
                Parsed::Garbage => {
                    self.skip = usize::MAX;
                    at = self.piece.len();
                }
                Parsed::Incomplete => break,
            }
        }
        self.piece.drain(..at);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{body::Says, event_stream::tests::message},
        *,
    };
    use proptest::prelude::*;

    fn says(first: &First) -> &'static str {
        match first {
            First::Incomplete => "incomplete",
            First::Preamble => "preamble",
            First::Content => "content",
            First::Error(_) => "error",
        }
    }

    const ERROR: &str =
        "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n";

    #[test]
    fn the_first_event_of_a_stream() {
        let first = |text: &str| first_event(text.as_bytes());
        for lead in ["", ": keep\n\n", "event: ping\ndata: {}\n\n", "\n", "\u{feff}", "data:\n\n"] {
            for ends in ["\n", "\r\n", "\r"] {
                let stream = format!("{lead}{ERROR}").replace('\n', ends);
                match first(&stream) {
                    First::Error(found) => assert_eq!(found.says, Some(Says::Overloaded)),
                    other => panic!("{stream:?}: {other:?}"),
                }
                let cut = first_event(&stream.as_bytes()[..stream.len() - 2 * ends.len()]);
                assert_eq!(says(&cut), "incomplete");
            }
        }
        assert_eq!(says(&first("data: x\n\n")), "content");
        assert_eq!(says(&first(&format!("data: x\n\n{ERROR}"))), "content");
        assert_eq!(says(&first("data: {\"error\":{\"code\":429}}\n\n")), "error");
        assert!(error_event(format!("data: x\n\n{ERROR}").as_bytes()).is_some());
        assert!(error_event(b"data: an error: event: error\n\n").is_none());
        let failed = "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"rate_limit_exceeded\"}}}\n\n";
        assert_eq!(error_event(failed.as_bytes()).and_then(|found| found.says), Some(Says::Throttled));
        let failed = "event: error\ndata: {\"type\":\"error\",\"code\":\"server_error\"}\n\n";
        assert_eq!(error_event(failed.as_bytes()).and_then(|found| found.says), Some(Says::Failed));
        assert!(error_event(b"data: {\"response\":{\"error\":null}}\n\n").is_none());
    }

    #[test]
    fn what_comes_before_content() {
        for (event, expected) in [
            (r#"{"type":"message_start","message":{"content":[]}}"#, "preamble"),
            (r#"{"type":"content_block_start","index":0}"#, "preamble"),
            (r#"{"type":"content_block_delta","delta":{"text":""}}"#, "content"),
            (r#"{"type":"response.created","response":{"error":null}}"#, "preamble"),
            (r#"{"type":"response.output_text.delta","delta":"x"}"#, "content"),
            (r#"{"type":"ping"}"#, "preamble"),
            (r#"{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#, "preamble"),
            (r#"{"choices":[],"prompt_filter_results":[]}"#, "preamble"),
            (r#"{"choices":[],"usage":{"total_tokens":5}}"#, "content"),
            (r#"{"choices":[{"delta":{"content":"x"}}]}"#, "content"),
            (r#"{"choices":[{"delta":{"role":"assistant","tool_calls":[{}]}}]}"#, "content"),
            (r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#, "content"),
            (r#"{"choices":[{"text":"x"}]}"#, "content"),
            (r#"{"candidates":[]}"#, "content"),
            ("[DONE]", "content"),
        ] {
            let stream = format!("data: {event}\n\n");
            assert_eq!(says(&first_event(stream.as_bytes())), expected, "{event}");
            let then = says(&first_event(format!("{stream}{ERROR}").as_bytes()));
            assert_eq!(then, if expected == "content" { "content" } else { "error" }, "{event}");
        }
        assert_eq!(says(&first_event(b"event: message_start\ndata: -\n\n")), "preamble");
    }

    fn event(kind: &str, payload: &[u8]) -> Vec<u8> {
        message(&[(":message-type", "event"), (":event-type", kind)], payload)
    }
    fn exception(kind: &str) -> Vec<u8> {
        message(&[(":message-type", "exception"), (":exception-type", kind)], b"{\"message\":\"Slow\"}")
    }
    fn chunk(json: &str) -> Vec<u8> {
        event("chunk", format!("{{\"bytes\":\"{}\"}}", BASE64_STANDARD.encode(json)).as_bytes())
    }

    #[test]
    fn the_first_message_of_amazon() {
        let begin = chunk(r#"{"type":"message_start"}"#);
        let delta = chunk(r#"{"type":"content_block_delta"}"#);
        let slow = exception("throttlingException");
        for lead in [vec![], event("initial-response", b""), event("messageStart", b"{}"), begin] {
            let stream = [&*lead, &*slow].concat();
            for cut in 0..stream.len() {
                let first = says(&first_message(&stream[..cut]));
                // The last checksum is not needed; an event is known by its headers.
                match first {
                    "error" => assert!(cut >= stream.len() - 4, "{cut}"),
                    "content" => panic!("{cut}"),
                    _ => assert!(cut < stream.len() - 4),
                }
            }
            match first_message(&stream) {
                First::Error(found) => assert_eq!(found.says, Some(Says::Throttled)),
                other => panic!("{other:?}"),
            }
            for content in [&*delta, &event("contentBlockDelta", b"{}"), b"plainly no message"] {
                let stream = [&*lead, content, &slow].concat();
                assert_eq!(says(&first_message(&stream)), "content");
            }
        }
    }

    /// All errors that a stream in these pieces shows, once it is out.
    fn late<'a>(format: Format, pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<Option<Says>> {
        let mut late = Late::new(format);
        let mut all: Vec<_> = pieces.into_iter().filter_map(|piece| late.look(piece)).collect();
        all.extend(late.end());
        all.into_iter().map(|found| found.says).collect()
    }

    #[test]
    fn an_error_after_content_is_found_however_the_stream_is_cut() {
        let text = format!("data: x\n\n{ERROR}");
        let frames = [event("messageStart", b"{}"), event("x", &[7; 100]), exception("throttlingException")];
        for (format, stream, expected) in [
            (Format::ServerSent, text.as_bytes(), Says::Overloaded),
            (Format::ServerSent, text.trim_end().as_bytes(), Says::Overloaded),
            (Format::ServerSent, text.replace('\n', "\r\n").as_bytes(), Says::Overloaded),
            (Format::Amazon, &frames.concat(), Says::Throttled),
        ] {
            for cut in 0..=stream.len() {
                let (one, two) = stream.split_at(cut);
                assert_eq!(late(format, [one, two]), [Some(expected)], "{format:?} {cut}");
            }
            assert_eq!(late(format, stream.chunks(1)), [Some(expected)], "{format:?}");
        }
    }

    #[test]
    fn what_is_too_long_is_passed_over() {
        let long = format!("data: {}\n\n", "x".repeat(PIECES));
        let stream = format!("{long}{ERROR}");
        let pieces = stream.as_bytes().chunks(1000);
        assert_eq!(late(Format::ServerSent, pieces), [Some(Says::Overloaded)]);
        let frames = [event("x", &[7; 100_000]), exception("throttlingException")].concat();
        let mut watch = Late::new(Format::Amazon);
        for piece in frames.chunks(1000) {
            let found = watch.look(piece);
            assert!(watch.piece.len() < 2000, "only what cannot be read yet is kept");
            assert!(found.is_none() || piece.as_ptr() == frames.chunks(1000).last().unwrap().as_ptr());
        }
        assert_eq!(late(Format::Amazon, [&b"plainly no message"[..], &*frames]), [], "lost, and silent");
    }

    proptest! {
        #[test]
        fn no_stream_panics(bytes in prop::collection::vec(any::<u8>(), 0..200), cut: prop::sample::Index) {
            let (one, two) = bytes.split_at(cut.index(bytes.len() + 1));
            for format in [Format::ServerSent, Format::Amazon] {
                let _ = format.first(&bytes);
                let _ = late(format, [one, two]);
            }
        }

        #[test]
        fn events_are_found_however_the_stream_is_cut(
            stream in "(data: x\n|event: error\n|event: message_start\ndata: 1\n|\n|\r\n|: c\n){0,12}",
        ) {
            let whole = says(&first_event(stream.as_bytes()));
            for cut in 0..stream.len() {
                // A verdict on a prefix is the verdict on the whole.
                match says(&first_event(&stream.as_bytes()[..cut])) {
                    "incomplete" | "preamble" => {}
                    prefix => prop_assert_eq!(prefix, whole),
                }
            }
        }
    }
}
