//! Three HTTP servers on loopback, each with its own quota, latency spread and way to say 429.
//!
//! What they do is scripted by `tower-herd-sim` and counted there, at the server: a client cannot flatter
//! itself. They live in a thread of their own, so that a busy client does not slow them down.

use std::{
    convert::Infallible,
    net::{Ipv4Addr, TcpListener},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::Request;
use http_body_util::BodyExt;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, runtime::Runtime};
use tower::ServiceExt;
use tower_herd_sim::{
    provider::{HintForm, LimitHeaders, Quota, Rate, Script, ScriptedProvider},
    scenario::Settings,
};

use crate::options::Target;

/// How the rungs differ: their latencies spread by so much, and so they talk.
///
/// All tell a wait of one second. The second and third also publish a request rate, far above what they
/// are asked for: it is their concurrency that is scarce, and nobody publishes that.
const VOICES: [(f64, HintForm, LimitHeaders); 3] = [
    (0.5, HintForm::Seconds, LimitHeaders::None),
    (0.4, HintForm::Millis, LimitHeaders::OpenAi),
    (0.3, HintForm::Seconds, LimitHeaders::Anthropic),
];

/// The servers.
pub struct Providers {
    runtime: Option<Runtime>,
    rungs: Vec<Server>,
}

struct Server {
    port: u16,
    now: Arc<Mutex<ScriptedProvider>>,
}

impl Providers {
    /// Binds and serves: on free ports, or on `port` and those after it.
    pub fn start(settings: &Settings, seed: u64, port: Option<u16>) -> Result<Self, String> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("providers")
            .enable_all()
            .build()
            .map_err(|e| format!("no thread for the providers: {e}"))?;
        let guard = runtime.enter();
        let mut rungs = Vec::new();
        for (at, script) in (0u16..).zip(scripts(settings, seed)) {
            let port = port.map_or(0, |first| first.saturating_add(at));
            let listener = listen(port).map_err(|e| {
                format!("cannot listen on 127.0.0.1:{port} ({e}): try another --listen PORT, or none for free ones")
            })?;
            let port = listener.local_addr().map_err(|e| e.to_string())?.port();
            let now = Arc::new(Mutex::new(ScriptedProvider::new(script)));
            runtime.spawn(accept(listener, now.clone()));
            rungs.push(Server { port, now });
        }
        drop(guard);
        Ok(Providers { runtime: Some(runtime), rungs })
    }

    /// Begins the story again: new quotas, empty books, the cut still to come.
    pub fn restart(&self, settings: &Settings, seed: u64) -> Vec<ScriptedProvider> {
        let fresh: Vec<_> = scripts(settings, seed).into_iter().map(ScriptedProvider::new).collect();
        for (server, provider) in self.rungs.iter().zip(&fresh) {
            *server.now.lock().unwrap_or_else(PoisonError::into_inner) = provider.clone();
        }
        fresh
    }

    /// Where they are, with the ceilings that they publish.
    pub fn targets(&self, settings: &Settings) -> Vec<Target> {
        let known = settings.ceilings.iter().map(|c| settings.configured.then_some(*c));
        let url = |port| format!("http://127.0.0.1:{port}/v1/chat/completions").parse().unwrap_or_default();
        self.rungs.iter().zip(known).map(|(s, ceiling)| Target { url: url(s.port), ceiling }).collect()
    }
}

impl Drop for Providers {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn listen(port: u16) -> std::io::Result<tokio::net::TcpListener> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
    listener.set_nonblocking(true)?;
    tokio::net::TcpListener::from_std(listener)
}

fn scripts(settings: &Settings, seed: u64) -> Vec<Script> {
    let script = |(at, ceiling): (usize, &u32)| {
        let (spread, form, headers) = VOICES[at % VOICES.len()];
        let rate = (headers != LimitHeaders::None).then(|| Rate::per_second(1000.0));
        let quota = |ceiling| Quota { requests: rate, ..Quota::concurrency(ceiling) };
        let script = Script::new(quota(*ceiling))
            .name(format!("rung {}", at + 1))
            .hint(settings.hint)
            .hint_form(form)
            .limit_headers(headers)
            .latency(settings.latency)
            .spread(spread)
            .refusal_latency(settings.refusal_latency)
            .seed(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(at as u64));
        match settings.cut_at {
            Some(cut) if at + 1 == settings.cut_rung => {
                script.change_at(settings.scaled(cut), quota(settings.cut_to))
            }
            _ => script,
        }
    };
    settings.ceilings.iter().enumerate().map(script).collect()
}

async fn accept(listener: tokio::net::TcpListener, now: Arc<Mutex<ScriptedProvider>>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(serve(stream, now.clone()))),
            // No file left to open: others will be closed.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

async fn serve(stream: TcpStream, now: Arc<Mutex<ScriptedProvider>>) {
    stream.set_nodelay(true).ok();
    let handle = service_fn(move |request: Request<Incoming>| {
        let provider = now.lock().unwrap_or_else(PoisonError::into_inner).clone();
        async move {
            let (head, body) = request.into_parts();
            // A request counts when all of it is here. If its body breaks off, the connection is gone too.
            body.collect().await.ok();
            // Infallible: only a scripted outage refuses connections, and there is none in this scenario.
            let reply = provider.service().oneshot(Request::from_parts(head, ())).await;
            Ok::<_, Infallible>(reply.unwrap_or_else(|_| {
                let mut down = http::Response::new(tower_herd_sim::provider::ScriptedBody::full(""));
                *down.status_mut() = http::StatusCode::BAD_GATEWAY;
                down
            }))
        }
    });
    // An error here is a client that hung up, which the provider has noted.
    http1::Builder::new().serve_connection(TokioIo::new(stream), handle).await.ok();
}
