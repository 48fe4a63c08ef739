use super::{Bill, Form, Reader, Usage, Weigh};
use bytes::Buf;
use http::{HeaderMap, header};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use std::{
    cell::Cell,
    fmt,
    io::IoSlice,
    pin::Pin,
    task::{Context, Poll},
};

pin_project! {
    /// A response body that is read for its usage while it passes.
    ///
    /// Dropped before the usage was told for sure, its call stays charged.
    pub struct MeteredBody<B, W: Weigh, G: Bill<W::Unit>> {
        #[pin]
        body: B,
        metering: Option<Metering<W, G>>,
    }

    impl<B, W: Weigh, G: Bill<W::Unit>> PinnedDrop for MeteredBody<B, W, G> {
        fn drop(this: Pin<&mut Self>) {
            if let Some(metering) = this.project().metering.take() {
                metering.cut_short();
            }
        }
    }
}

struct Metering<W, G> {
    /// None: the body cannot be read.
    reader: Option<Reader>,
    /// What a body further in has read.
    told: Option<Told>,
    weigh: W,
    bill: G,
}

/// No call uses more than 10^9 tokens. A reply that says so tells nothing: it must not empty an allowance, or a
/// bucket for a day.
fn is_believable(usage: &Usage) -> bool {
    usage.total().max(usage.cached).max(usage.cache_write) <= 1_000_000_000
}

/// What a reader says.
#[derive(Clone, Copy)]
struct Told {
    usage: Option<Usage>,
    is_final: bool,
}

thread_local! {
    /// Set by a metered body while it is polled, for the one around it, which then need not read.
    static TOLD: Cell<Option<Told>> = const { Cell::new(None) };
}

/// How a body behind such a head is written; none if it cannot be read. Without a content type it is tried as
/// JSON: anything else tells nothing.
pub(super) fn form(headers: &HeaderMap) -> Option<Form> {
    let is_plain = |encoding: &http::HeaderValue| encoding.as_bytes().eq_ignore_ascii_case(b"identity");
    if !headers.get(header::CONTENT_ENCODING).is_none_or(is_plain) {
        return None;
    }
    let Some(kind) = headers.get(header::CONTENT_TYPE) else { return Some(Form::Json) };
    let kind = kind.as_bytes();
    let has = |part: &[u8]| kind.windows(part.len()).any(|window| window.eq_ignore_ascii_case(part));
    if has(b"event-stream") {
        Some(Form::Events)
    } else if has(b"json") {
        Some(Form::Json)
    } else {
        None
    }
}

impl<W: Weigh, G: Bill<W::Unit>> Metering<W, G> {
    fn told(&self) -> Told {
        self.told.unwrap_or_else(|| Told {
            usage: self.reader.as_ref().and_then(Reader::usage).filter(is_believable),
            is_final: self.reader.as_ref().is_some_and(Reader::is_final),
        })
    }

    /// The usage that was told is all that will be.
    fn settle(self) {
        // Dropped, the bill stays as it was estimated.
        if let Some(usage) = self.told().usage {
            self.bill.settle(self.weigh.weigh(&usage));
        }
    }

    /// The body broke, or nobody wants the rest.
    fn cut_short(self) {
        let Told { usage, is_final } = self.told();
        if let Some(usage) = usage {
            let used = self.weigh.weigh(&usage);
            if is_final { self.bill.settle(used) } else { self.bill.at_least(used) }
        }
    }

    fn read<D: Buf>(&mut self, frame: &Frame<D>) {
        let Some(data) = frame.data_ref() else { return };
        let Some(reader) = &mut self.reader else { return };
        let mut slices = [IoSlice::new(&[]); 16];
        let filled = data.chunks_vectored(&mut slices);
        let slices = slices.get(..filled).unwrap_or_default();
        slices.iter().for_each(|slice| reader.feed(slice));
        if slices.iter().map(|slice| slice.len()).sum::<usize>() < data.remaining() {
            // In more pieces than can be looked at without taking them.
            self.reader = None;
        }
    }
}

impl<B, W: Weigh, G: Bill<W::Unit>> MeteredBody<B, W, G> {
    pub(super) fn new(body: B, form: Option<Form>, weigh: W, bill: G) -> Self
    where
        B: Body,
    {
        // A body that is over has nothing to tell, and is perhaps not polled any more: what holds its bill
        // may be dropped late.
        if body.is_end_stream() {
            return Self::from(body);
        }
        let reader = form.map(Reader::new);
        MeteredBody { body, metering: Some(Metering { reader, told: None, weigh, bill }) }
    }

    /// The body inside.
    pub fn get_ref(&self) -> &B {
        &self.body
    }
}

impl<B, W: Weigh, G: Bill<W::Unit>> From<B> for MeteredBody<B, W, G> {
    /// Not metered.
    fn from(body: B) -> Self {
        MeteredBody { body, metering: None }
    }
}

impl<B: Default, W: Weigh, G: Bill<W::Unit>> Default for MeteredBody<B, W, G> {
    fn default() -> Self {
        B::default().into()
    }
}

impl<B: Body, W: Weigh, G: Bill<W::Unit>> Body for MeteredBody<B, W, G> {
    type Data = B::Data;
    type Error = B::Error;

    #[inline]
    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let mut me = self.project();
        let Some(metering) = me.metering else { return me.body.poll_frame(cx) };
        TOLD.set(None);
        // Returned as it is: a frame is large, and to wrap it again would move it.
        let polled = me.body.as_mut().poll_frame(cx);
        metering.told = TOLD.take().or(metering.told);
        if let (Poll::Ready(Some(Ok(frame))), None) = (&polled, metering.told) {
            metering.read(frame);
        }
        let told = metering.told();
        let is_over = match &polled {
            Poll::Pending => false,
            Poll::Ready(Some(Ok(_))) => told.is_final || me.body.is_end_stream(),
            Poll::Ready(Some(Err(_))) => {
                if let Some(metering) = me.metering.take() {
                    metering.cut_short();
                }
                false
            }
            Poll::Ready(None) => true,
        };
        if is_over && let Some(metering) = me.metering.take() {
            metering.settle();
        }
        TOLD.set(Some(told));
        polled
    }

    #[inline]
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    #[inline]
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<B: fmt::Debug, W: Weigh, G: Bill<W::Unit>> fmt::Debug for MeteredBody<B, W, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MeteredBody")
            .field("body", &self.body)
            .field("metered", &self.metering.is_some())
            .finish()
    }
}
