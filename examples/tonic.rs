//! tonic's `Channel` behind the stack, against a gRPC server that misbehaves.
//!
//! ```text
//! cargo run --example tonic
//! ```
//!
//! A real server on loopback says UNAVAILABLE, pushes back, fails in the middle of a stream, or wants to hear
//! a stream twice. What comes of it is asserted, and told in plain words. Messages are plain texts, by the codec
//! at the end of this file, so that no protoc is needed: a generated client is made from the same stack by
//! `SearchClient::new(stack)`, since all it asks for is a service of http types.

use bytes::{Buf, BufMut};
use futures_util::{Stream, stream};
use http::uri::PathAndQuery;
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::{
    convert::Infallible,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{net::TcpListener, time::Instant};
use tonic::{
    Code, Request, Response, Status, Streaming,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    transport::{Channel, Endpoint},
};
use tower::{ServiceBuilder, service_fn};
use tower_herd::{
    AttemptTimeoutLayer, BoxError, ClassifyLayer, Fleet, FleetLimitLayer, JitteredRetryLayer, Refusal,
    RetryAfterLayer, Safety, Task, TaskLayer, replay,
};

/// The stack around a channel. Its bodies are erased and cannot be cloned: they are recorded while they are
/// sent, here up to 1 KiB, and a stream that outgrows that is sent once. A macro, so that its long type need
/// not be written.
macro_rules! stack {
    ($provider:expr, $channel:expr) => {
        ServiceBuilder::new()
            .layer(TaskLayer::new().deadline(Duration::from_secs(20)))
            .layer(
                JitteredRetryLayer::new()
                    .base(Duration::from_millis(50))
                    .resend(replay(1024, tonic::body::Body::new)),
            )
            .layer(RetryAfterLayer::new($provider))
            .layer(FleetLimitLayer::new($provider))
            .layer(ClassifyLayer::new($provider))
            .layer(AttemptTimeoutLayer::new(Duration::from_secs(5)))
            .service($channel)
    };
}

/// A request says what it may suffer. All of gRPC is POST, and an unkeyed POST is sent again only on proof that
/// it was not executed: say of reads that they are safe.
fn safe<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.extensions_mut().insert(Safety::Safe);
    request
}

fn say() -> PathAndQuery {
    PathAndQuery::from_static("/example.Search/Say")
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let fleet = Fleet::local();

    println!("1. UNAVAILABLE, then an answer.");
    for (request, wire) in [(safe("herd".to_owned()), 2), (Request::new("herd".to_owned()), 1)] {
        let server = serve(|n, _| match n {
            0 => Err(Status::unavailable("restarting")),
            _ => Ok(texts(&["found"])),
        })
        .await?;
        let provider = fleet.provider(&format!("search-{wire}"));
        let mut client = Grpc::new(stack!(&provider, server.channel()?));
        client.ready().await?;
        let outcome = client.unary(request, say(), Text).await;
        assert_eq!(server.calls().len(), wire);
        match outcome {
            Ok(reply) => println!("   A read was sent again, and heard {:?}.", reply.into_inner()),
            Err(status) => {
                println!("   A write was not: its caller heard {:?}, {:?}.", status.code(), status.message());
            }
        }
    }

    println!("2. RESOURCE_EXHAUSTED with a pushback of 600 ms (trailers only).");
    let server = serve(|n, _| match n {
        0 => Err(pushing_back(Status::resource_exhausted("slowly"), 600)),
        _ => Ok(texts(&["found"])),
    })
    .await?;
    let mut client = Grpc::new(stack!(&fleet.provider("pushing"), server.channel()?));
    client.ready().await?;
    let start = Instant::now();
    client.unary(Request::new("a write".to_owned()), say(), Text).await?;
    assert!(start.elapsed() >= Duration::from_millis(600) && server.calls().len() == 2);
    println!(
        "   It proves that nothing was executed: even a write went out again, {:.1?} later.",
        start.elapsed()
    );

    println!("3. A pushback of -1.");
    let server = serve(|_, _| Err(pushing_back(Status::unavailable("go away"), -1))).await?;
    let mut client = Grpc::new(stack!(&fleet.provider("never"), server.channel()?));
    client.ready().await?;
    let status =
        client.unary(safe("herd".to_owned()), say(), Text).await.expect_err("the server's own status");
    assert_eq!((status.code(), server.calls().len()), (Code::Unavailable, 1));
    println!("   It means: not again. The caller heard {:?} at once.", status.message());

    println!("4. A stream that fails after two messages, in its trailers.");
    let server = serve(|n, _| match n {
        0 => {
            let mut messages = texts(&["one", "two"]);
            messages.push(Err(pushing_back(Status::resource_exhausted("enough"), 500)));
            Ok(messages)
        }
        _ => Ok(texts(&["three"])),
    })
    .await?;
    let streaming = fleet.provider("streaming");
    let mut client = Grpc::new(stack!(&streaming, server.channel()?));
    client.ready().await?;
    let (heard, end) = listen(client.server_streaming(safe("herd".to_owned()), say(), Text).await?).await;
    assert_eq!((heard.len(), end.map(|status| status.code())), (2, Some(Code::ResourceExhausted)));
    assert_eq!((server.calls().len(), streaming.throttled()), (1, 1));
    println!(
        "   It was not repeated, since the caller has seen a part of it. But the provider is paused now:"
    );
    let start = Instant::now();
    client.ready().await?;
    client.server_streaming(safe("herd".to_owned()), say(), Text).await?;
    assert!(start.elapsed() >= Duration::from_millis(400));
    println!("   the next call waited {:.1?}.", start.elapsed());

    println!("5. A stream of ours that the server wants to hear again.");
    for (name, messages, wire) in [("short", 10, 2), ("long", 1000, 1)] {
        let server = serve(|n, _| match n {
            0 => Err(Status::unavailable("once more, please")),
            _ => Ok(texts(&["thanks"])),
        })
        .await?;
        let mut client = Grpc::new(stack!(&fleet.provider(name), server.channel()?));
        client.ready().await?;
        let story = stream::iter((0..messages).map(|n| format!("line {n}")));
        let outcome = client.client_streaming(safe(story), say(), Text).await;
        let calls = server.calls();
        assert!(calls.len() == wire && calls.iter().all(|lines| lines.len() == messages));
        match outcome {
            Ok(_) => println!("   {messages} lines fit into the record, and were sent twice, whole."),
            Err(status) => println!("   {messages} lines do not, and were sent once: {:?}.", status.code()),
        }
    }

    println!("6. A pause that outlasts the task.");
    let server = serve(|_, _| Err(pushing_back(Status::resource_exhausted("later"), 60_000))).await?;
    let mut client = Grpc::new(stack!(&fleet.provider("later"), server.channel()?));
    client.ready().await?;
    client.unary(Request::new("herd".to_owned()), say(), Text).await.expect_err("the server's own status");
    client.ready().await?;
    let mut request = Request::new("herd".to_owned());
    request.extensions_mut().insert(Task::new("invoice-4711").deadline_in(Duration::from_secs(5)));
    let status = client.unary(request, say(), Text).await.expect_err("refused");
    let refusal = Refusal::find(&status).expect("tonic keeps it as the source of its status");
    assert_eq!(server.calls().len(), 1);
    println!("   Refused at once, nothing was sent: {refusal}.");
    Ok(())
}

/// All messages of a stream, and its status if that is an error.
async fn listen(reply: Response<Streaming<String>>) -> (Vec<String>, Option<Status>) {
    let (mut replies, mut heard) = (reply.into_inner(), Vec::new());
    loop {
        match replies.message().await {
            Ok(Some(message)) => heard.push(message),
            Ok(None) => return (heard, None),
            Err(status) => return (heard, Some(status)),
        }
    }
}

// ------------------------------------------------------------------------------------------- the server

type Messages = Vec<Result<String, Status>>;
type Outgoing = Pin<Box<dyn Stream<Item = Result<String, Status>> + Send>>;

fn texts(texts: &[&str]) -> Messages {
    texts.iter().map(|text| Ok((*text).to_owned())).collect()
}

/// The status, with the wait that gRFC A6 gives it.
fn pushing_back(mut status: Status, millis: i32) -> Status {
    status.metadata_mut().insert("grpc-retry-pushback-ms", millis.into());
    status
}

struct Server {
    url: String,
    calls: Arc<Mutex<Vec<Vec<String>>>>,
}

impl Server {
    fn channel(&self) -> Result<Channel, tonic::transport::Error> {
        Ok(Endpoint::from_shared(self.url.clone())?.connect_lazy())
    }
    /// What it heard, call by call.
    fn calls(&self) -> Vec<Vec<String>> {
        self.calls.lock().expect("nobody panics with it").clone()
    }
}

/// Answers the n-th call with `answers(n, messages)` when it has heard all of it, until the program ends. An
/// error at once is "trailers only": its status stands in the head of the reply.
async fn serve(answers: fn(usize, &[String]) -> Result<Messages, Status>) -> Result<Server, BoxError> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let calls = Arc::new(Mutex::new(Vec::new()));
    let server = Server { url, calls: calls.clone() };
    // What a generated server would hold: a service of messages.
    let method = service_fn(move |request: Request<Streaming<String>>| {
        let calls = calls.clone();
        async move {
            let (mut incoming, mut heard) = (request.into_inner(), Vec::new());
            while let Some(message) = incoming.message().await? {
                heard.push(message);
            }
            let number = {
                let mut calls = calls.lock().expect("nobody panics with it");
                calls.push(heard.clone());
                calls.len() - 1
            };
            let messages = answers(number, &heard)?;
            Ok::<_, Status>(Response::new(Box::pin(stream::iter(messages)) as Outgoing))
        }
    });
    let service = hyper::service::service_fn(move |request| {
        let method = method.clone();
        async move { Ok::<_, Infallible>(tonic::server::Grpc::new(Text).streaming(method, request).await) }
    });
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let service = service.clone();
            tokio::spawn(async move {
                let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                // A client that hangs up is none of our business.
                builder.serve_connection(TokioIo::new(socket), service).await.ok();
            });
        }
    });
    Ok(server)
}

// ------------------------------------------------------------------------------------------- the codec

/// Texts as they are, where generated code has prost's messages.
#[derive(Clone, Copy)]
struct Text;

impl Codec for Text {
    type Encode = String;
    type Decode = String;
    type Encoder = Text;
    type Decoder = Text;
    fn encoder(&mut self) -> Text {
        Text
    }
    fn decoder(&mut self) -> Text {
        Text
    }
}

impl Encoder for Text {
    type Item = String;
    type Error = Status;
    fn encode(&mut self, text: String, buf: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buf.put_slice(text.as_bytes());
        Ok(())
    }
}

impl Decoder for Text {
    type Item = String;
    type Error = Status;
    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<String>, Status> {
        let bytes = buf.copy_to_bytes(buf.remaining());
        String::from_utf8(bytes.into()).map(Some).map_err(|_| Status::internal("not a text"))
    }
}
