//! Finds what a reply says of its own tokens, byte by byte: pure, without a buffer, never a panic.
//!
//! The bytes go through a small machine that knows strings, numbers and nesting of JSON, and remembers
//! under which of a few names it stands. Nothing is kept of the text, so a reply may be of any length and
//! cut into pieces anywhere.

use super::Usage;

/// How a reply is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// JSON: one document, an array of them, or one after the other.
    Json,
    /// Server-sent events whose data is JSON.
    Events,
}

/// Reads the usage out of a reply, whatever pieces it comes in.
///
/// Known are the members `usage` and `usageMetadata` of the document (or of its `response`, or
/// `message`), as OpenAI, Anthropic, Gemini and those who speak like them send them; in a stream the last
/// word counts, for each figure. Text that looks alike inside of a string, or deeper in the document, is
/// none of it: a model may write what it wants.
///
/// ```
/// use tower_herd::usage::{Form, Reader, Usage};
///
/// let mut reader = Reader::new(Form::Json);
/// reader.feed(br#"{"id":"x","usage":{"prompt_tok"#);
/// reader.feed(br#"ens":12,"completion_tokens":5}}"#);
/// assert_eq!(reader.usage(), Some(Usage { input: 12, output: 5, ..Usage::default() }));
/// assert!(reader.is_final());
/// ```
#[derive(Clone, Debug)]
pub struct Reader {
    json: Json,
    /// None: JSON without lines.
    lines: Option<Lines>,
}

impl Reader {
    /// Nothing was read yet.
    #[must_use]
    pub const fn new(form: Form) -> Self {
        let lines = match form {
            Form::Json => None,
            Form::Events => Some(Lines { at: At::Name(0), done: 0, after_cr: false }),
        };
        Reader { json: Json::new(), lines }
    }

    /// The next piece.
    pub fn feed(&mut self, bytes: &[u8]) {
        match &mut self.lines {
            None => self.json.feed(bytes),
            Some(lines) => lines.feed(bytes, &mut self.json),
        }
    }

    /// What has been told so far; none if nothing was.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        self.json.told.usage()
    }

    /// Whether that was the last word: the document has ended, or the stream said so.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match &self.lines {
            None => self.json.closed && self.json.told.any,
            Some(lines) => self.json.stopped || lines.done == DONE.len(),
        }
    }
}

// ------------------------------------------------------------------------------------ event streams

const DATA: &[u8] = b"data:";
/// What OpenAI, and those who speak like it, end their streams with.
const DONE: &[u8] = b"[DONE]";

#[derive(Clone, Debug)]
struct Lines {
    at: At,
    /// How much of [`DONE`] this line has shown; all of it: stays.
    done: usize,
    after_cr: bool,
}

#[derive(Clone, Copy, Debug)]
enum At {
    /// So much of [`DATA`] was matched since the line began.
    Name(usize),
    Data,
    /// A line of something else.
    Other,
}

impl Lines {
    fn feed(&mut self, mut bytes: &[u8], json: &mut Json) {
        while let Some(&byte) = bytes.first() {
            if byte == b'\n' && self.after_cr {
                self.after_cr = false;
                bytes = &bytes[1..];
                continue;
            }
            self.after_cr = false;
            if byte == b'\n' || byte == b'\r' {
                self.after_cr = byte == b'\r';
                match self.at {
                    // The end of an event. Its data was a document, whole or not.
                    At::Name(0) => json.restart(),
                    At::Data => json.feed(b"\n"),
                    At::Name(_) | At::Other => {}
                }
                self.at = At::Name(0);
                bytes = &bytes[1..];
                continue;
            }
            match self.at {
                At::Name(matched) if byte == DATA[matched] => {
                    self.at = if matched + 1 == DATA.len() { At::Data } else { At::Name(matched + 1) };
                    if self.done != DONE.len() {
                        self.done = 0;
                    }
                    bytes = &bytes[1..];
                }
                At::Name(_) => self.at = At::Other,
                At::Data | At::Other => {
                    let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
                    let (line, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
                    if matches!(self.at, At::Data) {
                        self.look_for_done(line);
                        json.feed(line);
                    }
                    bytes = rest;
                }
            }
        }
    }

    fn look_for_done(&mut self, line: &[u8]) {
        for byte in line {
            match DONE.get(self.done) {
                None => return,
                Some(next) if next == byte => self.done += 1,
                Some(_) if self.done == 0 && *byte == b' ' => {}
                Some(_) => self.done = NOT_DONE,
            }
        }
    }
}

/// The line is something else than [`DONE`].
const NOT_DONE: usize = usize::MAX;

// --------------------------------------------------------------------------------------------- JSON

/// Deeper members are only counted.
const DEPTH: usize = 5;
/// Longer names and values are none that we know.
const TEXT: usize = 32;

/// A name on the way to a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name {
    Other,
    /// An item of an array.
    Item,
    /// What has the usage inside: `response`, `message`.
    Envelope,
    Usage,
    Details,
    Type,
    Figure(Figure),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Figure {
    /// With all that came from a cache.
    Prompt,
    /// Without, where the two below stand beside it.
    Input,
    CacheRead,
    CacheWrite,
    Output,
    Cached,
    Tools,
    Thoughts,
}

fn name(text: &[u8]) -> Name {
    let figure = match text {
        b"usage" | b"usageMetadata" => return Name::Usage,
        b"response" | b"message" => return Name::Envelope,
        b"prompt_tokens_details" | b"input_tokens_details" => return Name::Details,
        b"type" => return Name::Type,
        b"prompt_tokens" | b"promptTokenCount" => Figure::Prompt,
        b"input_tokens" => Figure::Input,
        b"cache_read_input_tokens" => Figure::CacheRead,
        b"cache_creation_input_tokens" => Figure::CacheWrite,
        b"completion_tokens" | b"output_tokens" | b"candidatesTokenCount" => Figure::Output,
        b"cached_tokens" | b"cachedContentTokenCount" => Figure::Cached,
        b"toolUsePromptTokenCount" => Figure::Tools,
        b"thoughtsTokenCount" => Figure::Thoughts,
        _ => return Name::Other,
    };
    Name::Figure(figure)
}

/// The figures as they were told.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    any: bool,
    prompt: Option<u64>,
    input: u64,
    cache_read: u64,
    cache_write: u64,
    output: u64,
    cached: u64,
    tools: u64,
    thoughts: u64,
}

impl Told {
    fn tell(&mut self, figure: Figure, value: u64) {
        self.any = true;
        match figure {
            Figure::Prompt => self.prompt = Some(value),
            Figure::Input => self.input = value,
            Figure::CacheRead => self.cache_read = value,
            Figure::CacheWrite => self.cache_write = value,
            Figure::Output => self.output = value,
            Figure::Cached => self.cached = value,
            Figure::Tools => self.tools = value,
            Figure::Thoughts => self.thoughts = value,
        }
    }

    fn usage(&self) -> Option<Usage> {
        if !self.any {
            return None;
        }
        let (input, cached) = match self.prompt {
            Some(prompt) => (prompt, self.cached.max(self.cache_read)),
            None => {
                let beside = self.cache_read.saturating_add(self.cache_write);
                (self.input.saturating_add(beside), self.cached.max(self.cache_read))
            }
        };
        Some(Usage {
            input: input.saturating_add(self.tools),
            cached,
            cache_write: self.cache_write,
            output: self.output.saturating_add(self.thoughts),
        })
    }
}

#[derive(Clone, Copy, Debug)]
enum State {
    Between,
    /// Inside of a string: a name, or a value; after a backslash.
    Text {
        is_name: bool,
        escaped: bool,
    },
    /// None: not a whole number.
    Number(Option<u64>),
    /// `true`, `null`, or what should not be there.
    Word,
}

#[derive(Clone, Debug)]
struct Json {
    state: State,
    depth: usize,
    /// Which of the open containers are objects, by depth; those beyond 64 are taken for arrays.
    objects: u64,
    /// A string that comes now is a name.
    name_next: bool,
    /// The name under which what is being read stands, by depth; 0 is not used.
    path: [Name; DEPTH + 1],
    text: [u8; TEXT],
    /// More than fit: the text is none that we know.
    length: usize,
    told: Told,
    /// A document has ended.
    closed: bool,
    /// This document says that it is the last of its stream, ...
    stops: bool,
    /// ... and has ended.
    stopped: bool,
}

impl Json {
    const fn new() -> Self {
        Json {
            state: State::Between,
            depth: 0,
            objects: 0,
            name_next: false,
            path: [Name::Other; DEPTH + 1],
            text: [0; TEXT],
            length: 0,
            told: Told {
                any: false,
                prompt: None,
                input: 0,
                cache_read: 0,
                cache_write: 0,
                output: 0,
                cached: 0,
                tools: 0,
                thoughts: 0,
            },
            closed: false,
            stops: false,
            stopped: false,
        }
    }

    /// A new document; what was told stays.
    fn restart(&mut self) {
        self.state = State::Between;
        self.depth = 0;
        self.name_next = false;
        self.stops = false;
    }

    fn feed(&mut self, mut bytes: &[u8]) {
        while let Some((&byte, rest)) = bytes.split_first() {
            match self.state {
                State::Text { is_name, escaped: false } => {
                    let end = bytes.iter().position(|byte| matches!(byte, b'"' | b'\\'));
                    let (text, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
                    self.keep(text);
                    bytes = rest;
                    if let Some((&end, rest)) = rest.split_first() {
                        bytes = rest;
                        if end == b'"' {
                            self.state = State::Between;
                            self.text_ended(is_name);
                        } else {
                            // No name that we know has one.
                            self.length = TEXT + 1;
                            self.state = State::Text { is_name, escaped: true };
                        }
                    }
                    continue;
                }
                State::Text { is_name, escaped: true } => {
                    self.state = State::Text { is_name, escaped: false };
                }
                State::Number(value) => match byte {
                    b'0'..=b'9' => {
                        let digit = u64::from(byte - b'0');
                        let value = value.map(|value| value.saturating_mul(10).saturating_add(digit));
                        self.state = State::Number(value);
                    }
                    b'.' | b'e' | b'E' | b'+' | b'-' => self.state = State::Number(None),
                    _ => {
                        self.state = State::Between;
                        if let Some(value) = value {
                            self.number_ended(value);
                        }
                        continue;
                    }
                },
                State::Word if byte.is_ascii_alphanumeric() => {}
                State::Word | State::Between => self.between(byte),
            }
            bytes = rest;
        }
    }

    #[inline]
    fn between(&mut self, byte: u8) {
        self.state = State::Between;
        match byte {
            b'{' | b'[' => self.open(byte == b'{'),
            b'}' | b']' => self.close(),
            b',' => self.name_next = self.is_object(),
            b':' => self.name_next = false,
            b'"' => {
                self.length = 0;
                self.state = State::Text { is_name: self.name_next, escaped: false };
            }
            b'0'..=b'9' => self.state = State::Number(Some(u64::from(byte - b'0'))),
            b'-' => self.state = State::Number(None),
            byte if byte.is_ascii_alphabetic() => self.state = State::Word,
            _ => {}
        }
    }

    fn is_object(&self) -> bool {
        matches!(self.depth, 1..=64) && self.objects >> (self.depth - 1) & 1 == 1
    }

    fn open(&mut self, is_object: bool) {
        if self.depth == 0 {
            self.closed = false;
        }
        self.depth = self.depth.saturating_add(1);
        if let Some(bit) = 1_u64.checked_shl(u32::try_from(self.depth - 1).unwrap_or(u32::MAX)) {
            self.objects = if is_object { self.objects | bit } else { self.objects & !bit };
        }
        if let Some(name) = self.path.get_mut(self.depth) {
            *name = if is_object { Name::Other } else { Name::Item };
        }
        self.name_next = is_object;
    }

    fn close(&mut self) {
        self.depth = self.depth.saturating_sub(1);
        self.name_next = false;
        if self.depth == 0 {
            self.closed = true;
            self.stopped |= self.stops;
        }
    }

    fn keep(&mut self, text: &[u8]) {
        let end = self.length.saturating_add(text.len());
        if let Some(place) = self.text.get_mut(self.length..end) {
            place.copy_from_slice(text);
        }
        self.length = end.min(TEXT + 1);
    }

    fn text_ended(&mut self, is_name: bool) {
        let text = self.text.get(..self.length).unwrap_or_default();
        if is_name {
            if let Some(place) = self.path.get_mut(self.depth) {
                *place = name(text);
            }
        } else if self.path() == [Name::Type] {
            self.stops |= matches!(
                text,
                b"message_stop" | b"response.completed" | b"response.incomplete" | b"response.failed"
            );
        }
    }

    /// The names from the document down to what is being read; none where that is too deep.
    fn path(&self) -> &[Name] {
        match self.path.get(1..=self.depth) {
            Some([Name::Item, path @ ..]) => path,
            Some(path) => path,
            None => &[],
        }
    }

    fn number_ended(&mut self, value: u64) {
        use Name::{Details, Envelope, Usage};
        let figure = match *self.path() {
            [Usage, Name::Figure(figure)] | [Envelope, Usage, Name::Figure(figure)] => figure,
            [Usage, Details, Name::Figure(figure @ Figure::Cached)]
            | [Envelope, Usage, Details, Name::Figure(figure @ Figure::Cached)] => figure,
            _ => return,
        };
        self.told.tell(figure, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(form: Form, pieces: &[&[u8]]) -> (Option<Usage>, bool) {
        let mut reader = Reader::new(form);
        for piece in pieces {
            reader.feed(piece);
        }
        (reader.usage(), reader.is_final())
    }

    const fn usage(input: u64, cached: u64, cache_write: u64, output: u64) -> Usage {
        Usage { input, cached, cache_write, output }
    }

    const CHAT: &str = r#"{"id":"c","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant",
        "content":"{\"usage\":{\"prompt_tokens\":999}} \\"},"finish_reason":"stop"}],"usage":{"prompt_tokens":19,
        "completion_tokens":10,"total_tokens":29,"prompt_tokens_details":{"cached_tokens":7,"audio_tokens":0},
        "completion_tokens_details":{"reasoning_tokens":4,"cached_tokens":1000}}}"#;
    const RESPONSES: &str = r#"{"id":"r","output":[],"usage":{"input_tokens":36,"input_tokens_details":
        {"cached_tokens":30},"output_tokens":87,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":123}}"#;
    const CLAUDE: &str = r#"{"type":"message","content":[{"type":"tool_use","input":{"usage":{"input_tokens":5000}}}],
        "usage":{"input_tokens":100,"cache_creation_input_tokens":20,"cache_read_input_tokens":300,
        "cache_creation":{"input_tokens":9999},"output_tokens":50}}"#;
    const GEMINI: &str = r#"[{"candidates":[{"content":{"parts":[{"text":"a"}]}}],"usageMetadata":
        {"promptTokenCount":8,"totalTokenCount":8}}
        ,{"candidates":[],"usageMetadata":{"promptTokenCount":8,"candidatesTokenCount":5,"thoughtsTokenCount":3,
        "cachedContentTokenCount":2,"toolUsePromptTokenCount":1,"totalTokenCount":19}}]"#;
    const CHAT_STREAM: &str = concat!(
        ": OPENROUTER PROCESSING\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"[DONE]\\n\\ndata: x\"}}],\"usage\":null}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,\"total_tokens\":7}}\n\n",
        "data: [DONE]\n\n",
    );
    const CLAUDE_STREAM: &str = concat!(
        "event: message_start\r\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":25,",
        "\"cache_read_input_tokens\":5,\"output_tokens\":1}}}\r\n\r\n",
        "event: content_block_delta\r\ndata: {\"type\":\"content_block_delta\",\"delta\":",
        "{\"text\":\"message_stop\"}}\r\n\r\n",
        "event: message_delta\r\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\r\n",
        "data: \"usage\":{\"output_tokens\":15}}\r\n\r\n",
        "event: message_stop\r\ndata: {\"type\":\"message_stop\"}\r\n\r\n",
    );
    const RESPONSES_STREAM: &str = concat!(
        "event: response.created\ndata:{\"type\":\"response.created\",\"response\":{\"usage\":null}}\n\n",
        "event: response.completed\ndata:{\"type\":\"response.completed\",\"response\":{\"usage\":",
        "{\"input_tokens\":2,\"output_tokens\":9,\"input_tokens_details\":{\"cached_tokens\":1}}}}\n\n",
    );
    const GEMINI_STREAM: &str = concat!(
        "data: {\"usageMetadata\":{\"promptTokenCount\":4,\"candidatesTokenCount\":1}}\r\n\r\n",
        "data: {\"usageMetadata\":{\"promptTokenCount\":4,\"candidatesTokenCount\":6}}\r\n\r\n",
    );
    /// A gateway that speaks like OpenAI, and tells the other's figures beside.
    const GATEWAY: &str = r#"{"usage":{"prompt_tokens":420,"completion_tokens":50,"cache_read_input_tokens":300,
        "cache_creation_input_tokens":20,"prompt_tokens_details":{"cached_tokens":300}}}"#;

    const REPLIES: [(&str, Form, &str, Usage, bool); 9] = [
        ("chat", Form::Json, CHAT, usage(19, 7, 0, 10), true),
        ("responses", Form::Json, RESPONSES, usage(36, 30, 0, 87), true),
        ("claude", Form::Json, CLAUDE, usage(420, 300, 20, 50), true),
        ("gemini", Form::Json, GEMINI, usage(9, 2, 0, 8), true),
        ("gateway", Form::Json, GATEWAY, usage(420, 300, 20, 50), true),
        ("chat stream", Form::Events, CHAT_STREAM, usage(3, 0, 0, 4), true),
        ("claude stream", Form::Events, CLAUDE_STREAM, usage(30, 5, 0, 15), true),
        ("responses stream", Form::Events, RESPONSES_STREAM, usage(2, 1, 0, 9), true),
        // Only its end tells that it has ended.
        ("gemini stream", Form::Events, GEMINI_STREAM, usage(4, 0, 0, 6), false),
    ];

    #[test]
    fn what_providers_send() {
        for (name, form, reply, expected, is_final) in REPLIES {
            assert_eq!(read(form, &[reply.as_bytes()]), (Some(expected), is_final), "{name}");
        }
    }

    #[test]
    fn pieces_of_any_size_say_the_same() {
        for (name, form, reply, expected, is_final) in REPLIES {
            for size in 1..40 {
                let pieces: Vec<_> = reply.as_bytes().chunks(size).collect();
                assert_eq!(read(form, &pieces), (Some(expected), is_final), "{name}, {size} bytes each");
            }
        }
    }

    #[test]
    fn nothing_is_final_before_its_end() {
        for (name, form, reply, _, is_final) in REPLIES {
            let text = reply.trim_end();
            let short = &text.as_bytes()[..text.len() - 2];
            assert!(!read(form, &[short]).1 || form == Form::Events && !is_final, "{name}");
        }
        // The text of a model that ends its own stream.
        let chat = CHAT_STREAM.split_inclusive("\n\n").take(2).collect::<String>();
        assert_eq!(read(Form::Events, &[chat.as_bytes()]), (None, false));
        let claude = CLAUDE_STREAM.split_inclusive("\r\n\r\n").take(2).collect::<String>();
        assert_eq!(read(Form::Events, &[claude.as_bytes()]), (Some(usage(30, 5, 0, 1)), false));
    }

    #[test]
    fn what_is_no_usage() {
        for reply in [
            "",
            "null",
            "[]",
            "{}",
            "<!DOCTYPE html>",
            r#"{"usage":null}"#,
            r#"{"usage":"12"}"#,
            r#"{"usage":{"prompt_tokens":"12"}}"#,
            r#"{"usage":{"prompt_tokens":-12}}"#,
            r#"{"usage":{"prompt_tokens":1.5}}"#,
            r#"{"usage":[{"prompt_tokens":1}]}"#,
            r#"{"usage":{"prompt_tokens":12"#,
            r#"{"\u0075sage":{"prompt_tokens":1}}"#,
            r#"{"a":{"usage":{"prompt_tokens":1}}}"#,
            r#"[[{"usage":{"prompt_tokens":1}}]]"#,
            r#"{"a":"usage","b":{"prompt_tokens":1}}"#,
            r#"{"usage_":{"prompt_tokens":1}}"#,
            r#"{"usage":{"a":{"prompt_tokens":1}}}"#,
        ] {
            assert_eq!(read(Form::Json, &[reply.as_bytes()]), (None, false), "{reply}");
        }
        let huge = format!(r#"{{"usage":{{"prompt_tokens":{}}}}}"#, "9".repeat(99));
        assert_eq!(read(Form::Json, &[huge.as_bytes()]).0.map(|usage| usage.input), Some(u64::MAX));
    }

    #[test]
    fn nesting_without_end_is_counted_and_left_again() {
        for depth in [4, 63, 64, 65, 100_000] {
            let reply = format!(
                r#"{{"a":{}"usage"{},"usage":{{"prompt_tokens":1}}}}"#,
                "[".repeat(depth),
                "]".repeat(depth)
            );
            assert_eq!(read(Form::Json, &[reply.as_bytes()]), (Some(usage(1, 0, 0, 0)), true), "{depth}");
        }
    }

    fn form() -> impl Strategy<Value = Form> {
        prop::sample::select(vec![Form::Json, Form::Events])
    }

    /// Bytes that look like a reply, and are none.
    fn garbage() -> impl Strategy<Value = Vec<u8>> {
        let parts = prop::sample::select(vec![
            "{",
            "}",
            "[",
            "]",
            "\"",
            "\\",
            ":",
            ",",
            "1",
            "-",
            "e",
            "null",
            "usage",
            "\"usage\":{",
            "\"prompt_tokens\":",
            "data:",
            "data: ",
            "[DONE]",
            "\n",
            "\r",
            "\r\n\r\n",
            "\"type\":\"message_stop\"",
        ]);
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..200),
            prop::collection::vec(parts, 0..100).prop_map(|parts| parts.concat().into_bytes()),
        ]
    }

    /// `bytes`, cut at these places.
    fn cut<'a>(bytes: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
        let mut places: Vec<_> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        places.extend([0, bytes.len()]);
        places.sort_unstable();
        places.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect()
    }

    proptest! {
        #[test]
        fn garbage_does_no_harm_and_reads_the_same_in_any_pieces(
            form in form(), bytes in garbage(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        ) {
            let whole = read(form, &[&bytes]);
            prop_assert_eq!(read(form, &cut(&bytes, &cuts)), whole);
        }

        #[test]
        fn serde_json_agrees(prompt: u32, output: u32, cached: u32, text: String, cuts: [prop::sample::Index; 8]) {
            let reply = serde_json::json!({
                "choices": [{"message": {"content": text, "usage": {"prompt_tokens": 1}}}],
                text: {"usage": {"output_tokens": 5}},
                "usage": {
                    "prompt_tokens": prompt,
                    "completion_tokens": output,
                    "prompt_tokens_details": {"cached_tokens": cached},
                },
            })
            .to_string();
            let expected = usage(prompt.into(), cached.into(), 0, output.into());
            let pieces = cut(reply.as_bytes(), &cuts);
            prop_assert_eq!(read(Form::Json, &pieces), (Some(expected), true));
            let event = format!("event: x\ndata: {reply}\n\ndata: [DONE]\n\n");
            prop_assert_eq!(read(Form::Events, &cut(event.as_bytes(), &cuts)), (Some(expected), true));
        }
    }
}
