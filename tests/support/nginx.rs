//! A provider that nobody here wrote: a real nginx with `limit_conn` and `limit_req`, answering 429.
//!
//! Everything else in the tests shares our own idea of what "in flight" means. nginx has its own: it counts
//! a request from the moment its header is read until the request is freed, *after* the last byte was handed
//! to the socket and after the log line was written; two worker processes share the count. So this is the
//! place where an off-by-one of ours, or a slot returned too early, shows as a 429.
//!
//! ```ignore
//! let upstream = Upstream::start(|_| Reply::after(Duration::from_millis(50))).await;
//! let nginx = Config::new(upstream.addr()).limit_conn(20).retry_after(1).start().await;
//! // ... calls to nginx.url("/v1/complete") ...
//! let log = nginx.finish().await;
//! assert_eq!(log.count(429), 0);
//! ```
//!
//! # Where the latency comes from
//! nginx's core cannot sleep, and `limit_rate` on a file sends a first burst at once and rounds to its own
//! timer, so the time of a reply would be a guess. [`Upstream`] is a small HTTP server inside the test which
//! waits as long as it is told; nginx proxies to it.
//!
//! * `proxy_buffering off`: the reply's bytes go to the client as they come. With buffering, nginx would
//!   collect a streamed body first and the test could not tell a held stream from a slow one.
//! * `proxy_request_buffering` stays on: the upstream only ever sees whole requests.
//! * `proxy_next_upstream off`: otherwise nginx itself may send a request again.
//!
//! # How it starts and stops
//! The helper binds the port and hands the open socket down (as standard input, named in the variable
//! `NGINX`, the way nginx takes sockets over from an older instance). No other process can take the port
//! between choosing and using it, so tests may run in parallel. Dropping [`Nginx`] stops master and workers:
//! a plain kill of the master would leave its workers serving.
#![allow(dead_code, unreachable_pub, reason = "every test binary includes this file and uses a part of it")]

use std::{
    ffi::OsString,
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

/// How long starting and stopping may take before the test fails.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a private nginx enforces, and in front of what.
#[derive(Clone, Debug)]
pub struct Config {
    upstream: SocketAddr,
    workers: u32,
    key: String,
    limit_conn: Option<u32>,
    limit_req: Option<(u32, u32)>,
    retry_after: Option<u32>,
    ignore_client_abort: bool,
}

impl Config {
    /// No limits yet; two workers.
    pub fn new(upstream: SocketAddr) -> Self {
        Self {
            upstream,
            workers: 2,
            key: "$server_name".to_owned(),
            limit_conn: None,
            limit_req: None,
            retry_after: None,
            ignore_client_abort: false,
        }
    }

    /// The number of worker processes (they share all counts).
    pub fn workers(mut self, workers: u32) -> Self {
        self.workers = workers;
        self
    }

    /// What is counted apart, as an nginx variable: `$http_x_account`, `$uri`. The default is one count for
    /// everybody. A request whose key is empty is not limited.
    pub fn key(mut self, variable: impl Into<String>) -> Self {
        self.key = variable.into();
        self
    }

    /// At most so many requests in flight.
    pub fn limit_conn(mut self, ceiling: u32) -> Self {
        self.limit_conn = Some(ceiling);
        self
    }

    /// At most so many requests a second, and so many ahead of time (`burst`, `nodelay`: nothing is queued).
    ///
    /// A burst of 0 refuses every request that comes a millisecond before its turn.
    pub fn limit_req(mut self, per_second: u32, burst: u32) -> Self {
        self.limit_req = Some((per_second, burst));
        self
    }

    /// 429s carry `Retry-After: seconds`. Without it they are bare, as nginx's are.
    pub fn retry_after(mut self, seconds: u32) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// The provider that does not abort: a call that its caller dropped keeps running, and keeps its place
    /// in the count, until the upstream has answered. By default nginx notices at once, logs 499, closes the
    /// upstream connection and counts the call down.
    pub fn ignore_client_abort(mut self, ignore: bool) -> Self {
        self.ignore_client_abort = ignore;
        self
    }

    /// Starts it.
    ///
    /// # Panics
    /// With everything nginx said, if it is missing or does not start.
    pub async fn start(self) -> Nginx {
        match self.try_start().await {
            Ok(nginx) => nginx,
            Err(why) => panic!("{why}"),
        }
    }

    /// Starts it, or tells why not: the binary, the reason, and nginx's own error log.
    pub async fn try_start(self) -> Result<Nginx, String> {
        let binary = binary()?;
        let folder = Folder::new().map_err(|e| format!("no folder for nginx: {e}"))?;
        let error_log = folder.0.join("error.log");
        let config_file = folder.0.join("nginx.conf");

        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .and_then(|socket| {
                // nginx sets this on sockets it opened, not on those it inherits: a worker would block in
                // `accept` whenever the other one was quicker.
                socket.set_nonblocking(true)?;
                Ok((socket.local_addr()?, socket))
            })
            .map_err(|e| format!("no port on 127.0.0.1 for nginx: {e}"));
        let (addr, socket) = socket?;
        let config = self.render(addr, &folder.0);
        fs::write(&config_file, &config)
            .map_err(|e| format!("cannot write {}: {e}", config_file.display()))?;

        // The child holds the socket from here on: the command, and with it our copy, goes at the end of
        // the statement.
        let child = command(&binary, &folder.0)
            .env("NGINX", "0;")
            .stdin(Stdio::from(OwnedFd::from(socket)))
            .spawn()
            .map_err(|e| format!("cannot run {}: {e}", binary.display()))?;
        let mut nginx = Nginx { addr, binary, child, folder };

        let deadline = Instant::now() + PATIENCE;
        let why = loop {
            match nginx.child.try_wait() {
                Ok(None) => {}
                Ok(Some(status)) => break format!("it ended with {status}"),
                Err(e) => break format!("it cannot be watched: {e}"),
            }
            if nginx.folder.0.join("nginx.pid").exists() && ready(addr).await {
                return Ok(nginx);
            }
            if Instant::now() >= deadline {
                break format!("no answer on {addr} within {PATIENCE:?}");
            }
            sleep(Duration::from_millis(5)).await;
        };
        let said = fs::read_to_string(&error_log).unwrap_or_else(|e| format!("(unreadable: {e})"));
        Err(format!(
            "nginx ({}) did not start: {why}\n--- its error log:\n{said}\n--- its configuration:\n{config}",
            nginx.binary.display(),
        ))
    }

    fn render(&self, addr: SocketAddr, folder: &Path) -> String {
        let folder = folder.display();
        let Self { upstream, workers, key, .. } = self;
        let (mut zones, mut limits) = (String::new(), String::new());
        if let Some(ceiling) = self.limit_conn {
            zones += &format!("  limit_conn_zone {key} zone=calls:1m;\n");
            limits += &format!("      limit_conn calls {ceiling};\n");
        }
        if let Some((rate, burst)) = self.limit_req {
            zones += &format!("  limit_req_zone {key} zone=rate:1m rate={rate}r/s;\n");
            let burst = match burst {
                0 => String::new(),
                burst => format!(" burst={burst} nodelay"),
            };
            limits += &format!("      limit_req zone=rate{burst};\n");
        }
        let hint = self
            .retry_after
            .map_or_else(String::new, |seconds| format!("add_header Retry-After {seconds} always;"));
        let abort = if self.ignore_client_abort { "on" } else { "off" };
        format!(
            r#"daemon off;
worker_processes {workers};
worker_shutdown_timeout 5s;
pid {folder}/nginx.pid;
error_log {folder}/error.log notice;
events {{ worker_connections 8192; }}
http {{
  log_format herd '$status $request_time $connection $pid $msec $limit_conn_status $limit_req_status $request_uri';
  access_log {folder}/access.log herd;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  client_body_buffer_size 1m;
  keepalive_requests 1000000;
  limit_conn_status 429;
  limit_req_status 429;
  limit_conn_log_level info;
  limit_req_log_level info;
{zones}
  upstream slow {{
    server {upstream} max_fails=0;
    keepalive 512;
    keepalive_requests 1000000;
  }}
  server {{
    # A socket for each worker, or an idle machine would give one of them nearly all connections.
    listen {addr} reuseport backlog=4096;
    server_name herd;
    error_page 429 @limited;
    location = /ready {{ access_log off; return 204; }}
    location /free {{ proxy_pass http://slow; }}
    location / {{
{limits}      proxy_pass http://slow;
    }}
    location @limited {{
      internal;
      default_type application/json;
      {hint}
      return 429 '{{"error":{{"type":"rate_limited"}}}}';
    }}
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_buffering off;
    proxy_next_upstream off;
    proxy_ignore_client_abort {abort};
  }}
}}
"#
        )
    }
}

/// A running nginx; it stops when dropped.
#[derive(Debug)]
pub struct Nginx {
    addr: SocketAddr,
    binary: PathBuf,
    child: Child,
    // Declared last: the folder goes after the process.
    folder: Folder,
}

impl Nginx {
    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The URL of a path. All paths are limited but `/free...` and `/ready`.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }

    /// What it has logged so far. The line of a reply is written just *after* the reply, so a count taken
    /// at once may lack the last ones; see [`Nginx::settled`] and [`Nginx::finish`].
    pub fn log(&self) -> Log {
        Log::read(&self.folder.0.join("access.log"))
    }

    /// What it has logged once there are `lines` lines.
    ///
    /// # Panics
    /// If they do not come within ten seconds.
    pub async fn settled(&self, lines: usize) -> Log {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let log = self.log();
            if log.0.len() >= lines {
                return log;
            }
            assert!(Instant::now() < deadline, "nginx logged {} calls, not {lines}", log.0.len());
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Lets the running calls end (5 s at most), stops it, and returns the whole log.
    pub async fn finish(mut self) -> Log {
        self.signal("quit");
        let deadline = Instant::now() + PATIENCE;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            sleep(Duration::from_millis(5)).await;
        }
        self.log()
    }

    /// nginx's error log, for a failing test's message.
    pub fn errors(&self) -> String {
        fs::read_to_string(self.folder.0.join("error.log")).unwrap_or_default()
    }

    fn signal(&self, signal: &str) {
        // Through nginx itself, since std can only send SIGKILL. Its failure is no news: then the process
        // is gone, or the kill below ends it.
        command(&self.binary, &self.folder.0).args(["-s", signal]).stdin(Stdio::null()).status().ok();
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal("stop");
            if !self.folder.0.join("nginx.pid").exists() {
                // It has no pid file, so it did not get as far as taking signals or starting workers.
                self.child.kill().ok();
            }
            // Bounded: a stopping master kills workers that do not go within a second.
            self.child.wait().ok();
        }
    }
}

/// One call, as nginx saw it.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// 200, 429, 499 (the client went away), 502 ...
    pub status: u16,
    /// From the first byte of the request to the last of the reply.
    pub took: Duration,
    /// The number of the client's connection.
    pub connection: u64,
    /// The worker process.
    pub worker: u32,
    /// When it ended, seconds since the epoch, to the millisecond.
    pub ended: f64,
    /// Which of the two limits refused it.
    pub refused_by: Option<Limit>,
    /// Path and query.
    pub uri: String,
}

/// The limit that refused a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// `limit_conn`.
    Connections,
    /// `limit_req`.
    Rate,
}

/// nginx's access log.
#[derive(Clone, Debug, Default)]
pub struct Log(pub Vec<Line>);

impl Log {
    /// How many calls ended with this status.
    pub fn count(&self, status: u16) -> usize {
        self.0.iter().filter(|line| line.status == status).count()
    }

    /// How many calls one limit refused.
    pub fn refused_by(&self, limit: Limit) -> usize {
        self.0.iter().filter(|line| line.refused_by == Some(limit)).count()
    }

    /// How many worker processes served.
    pub fn workers(&self) -> usize {
        let mut pids: Vec<_> = self.0.iter().map(|line| line.worker).collect();
        pids.sort_unstable();
        pids.dedup();
        pids.len()
    }

    fn read(file: &Path) -> Self {
        let text = fs::read_to_string(file).unwrap_or_default();
        // The last line may be half written.
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        Self(
            whole
                .lines()
                .map(|line| {
                    Line::parse(line).unwrap_or_else(|| panic!("not a line of the log format: {line:?}"))
                })
                .collect(),
        )
    }
}

impl Line {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.splitn(8, ' ');
        let status = fields.next()?.parse().ok()?;
        let took = Duration::try_from_secs_f64(fields.next()?.parse().ok()?).ok()?;
        let connection = fields.next()?.parse().ok()?;
        let worker = fields.next()?.parse().ok()?;
        let ended = fields.next()?.parse().ok()?;
        let (by_connections, by_rate) = (fields.next()?, fields.next()?);
        let refused_by = match (by_connections, by_rate) {
            ("REJECTED", _) => Some(Limit::Connections),
            (_, "REJECTED") => Some(Limit::Rate),
            _ => None,
        };
        let uri = fields.next()?.to_owned();
        Some(Self { status, took, connection, worker, ended, refused_by, uri })
    }
}

/// When and how an [`Upstream`] answers one call: 200, and a small JSON body.
#[derive(Clone, Copy, Debug)]
pub struct Reply {
    head_after: Duration,
    parts: u32,
    part_every: Duration,
}

impl Reply {
    /// Head and body together, after this long.
    pub fn after(latency: Duration) -> Self {
        Self { head_after: latency, parts: 1, part_every: Duration::ZERO }
    }

    /// The body comes in parts: the first with the head, the others this far apart.
    pub fn in_parts(mut self, parts: u32, every: Duration) -> Self {
        self.parts = parts.max(1);
        self.part_every = every;
        self
    }
}

/// A small HTTP/1.1 server behind nginx that answers when it is told to, and counts what reached it.
#[derive(Debug)]
pub struct Upstream {
    addr: SocketAddr,
    counts: Arc<Counts>,
    accepting: tokio::task::JoinHandle<()>,
}

/// What reached an [`Upstream`]; read at any time.
#[derive(Debug, Default)]
pub struct Counts {
    started: AtomicUsize,
    finished: AtomicUsize,
    aborted: AtomicUsize,
    running: AtomicUsize,
    peak: AtomicUsize,
}

impl Counts {
    /// Calls that came.
    pub fn started(&self) -> usize {
        self.started.load(Ordering::SeqCst)
    }

    /// Calls answered to the last byte.
    pub fn finished(&self) -> usize {
        self.finished.load(Ordering::SeqCst)
    }

    /// Calls whose connection nginx closed first.
    pub fn aborted(&self) -> usize {
        self.aborted.load(Ordering::SeqCst)
    }

    /// Calls running now.
    pub fn running(&self) -> usize {
        self.running.load(Ordering::SeqCst)
    }

    /// The most calls that ran at one time.
    pub fn peak(&self) -> usize {
        self.peak.load(Ordering::SeqCst)
    }
}

/// A call running at the upstream; its end is counted wherever it leaves the scope.
struct Running<'a>(&'a Counts);

impl<'a> Running<'a> {
    fn new(counts: &'a Counts) -> (Self, usize) {
        let number = counts.started.fetch_add(1, Ordering::SeqCst);
        let running = counts.running.fetch_add(1, Ordering::SeqCst) + 1;
        counts.peak.fetch_max(running, Ordering::SeqCst);
        (Self(counts), number)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Upstream {
    /// Starts it; `reply` gets the number of the call, from 0.
    pub async fn start(reply: impl Fn(usize) -> Reply + Send + Sync + 'static) -> Self {
        let socket = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .await
            .expect("a port on 127.0.0.1 for the upstream");
        let addr = socket.local_addr().expect("the upstream's address");
        let counts = Arc::new(Counts::default());
        let (shared, reply) = (Arc::clone(&counts), Arc::new(reply));
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = socket.accept().await {
                let (counts, reply) = (Arc::clone(&shared), Arc::clone(&reply));
                tokio::spawn(async move { serve(stream, &counts, &*reply).await });
            }
        });
        Self { addr, counts, accepting }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// What reached it.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Answers the calls of one connection until it is closed.
async fn serve(mut stream: TcpStream, counts: &Counts, reply: &(dyn Fn(usize) -> Reply + Send + Sync)) {
    stream.set_nodelay(true).ok();
    let mut buffer = Vec::with_capacity(4096);
    while let Some(length) = read_request(&mut stream, &mut buffer).await {
        buffer.drain(..length);
        let (running, number) = Running::new(counts);
        let reply = reply(number);
        for part in 0..reply.parts {
            let wait = if part == 0 { reply.head_after } else { reply.part_every };
            // nginx sends nothing while it waits, so a read that ends means that it has hung up.
            let gone = timeout(wait, stream.read_buf(&mut buffer)).await.is_ok();
            if gone || write_part(&mut stream, part, reply.parts).await.is_err() {
                counts.aborted.fetch_add(1, Ordering::SeqCst);
                return;
            }
            if part + 1 == reply.parts {
                counts.finished.fetch_add(1, Ordering::SeqCst);
            }
        }
        drop(running);
    }
}

/// Reads one whole request; its length, or `None` when the connection has ended.
async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<usize> {
    loop {
        if let Some(head) = buffer.windows(4).position(|w| w == b"\r\n\r\n") {
            let head = head + 4;
            let text = String::from_utf8_lossy(&buffer[..head]);
            let body = text
                .lines()
                .filter_map(|line| line.split_once(':'))
                .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
                .map_or(Some(0), |(_, value)| value.trim().parse::<usize>().ok())?;
            if buffer.len() >= head + body {
                return Some(head + body);
            }
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
}

async fn write_part(stream: &mut TcpStream, part: u32, parts: u32) -> std::io::Result<()> {
    const BODY: &str = "{\"ok\":true}\n";
    let mut text = String::new();
    if part == 0 {
        text += &format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            BODY.len() * parts as usize
        );
    }
    text.push_str(BODY);
    stream.write_all(text.as_bytes()).await
}

/// A folder that goes with its owner.
#[derive(Debug)]
struct Folder(PathBuf);

impl Folder {
    fn new() -> std::io::Result<Self> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("herd-nginx-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        // What a process of the same number left behind.
        fs::remove_dir_all(&path).ok();
        fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// `NGINX_BIN`, or the first nginx on the `PATH` or where distributions put it.
fn binary() -> Result<PathBuf, String> {
    if let Some(named) = std::env::var_os("NGINX_BIN") {
        let named = PathBuf::from(named);
        return if named.is_file() {
            Ok(named)
        } else {
            Err(format!("NGINX_BIN names {}, which is no file", named.display()))
        };
    }
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(OsString::from(":/usr/sbin:/usr/local/sbin"));
    std::env::split_paths(&path).map(|folder| folder.join("nginx")).find(|file| file.is_file()).ok_or_else(
        || {
            "this test needs nginx, and none was found: install it (Debian: apt-get install nginx), \
             name it in NGINX_BIN, or run tests/run, which does so"
                .to_owned()
        },
    )
}

/// nginx with the configuration in this folder. Early errors go to the log there as well: without `-e` they
/// would go to a file of the system.
fn command(binary: &Path, folder: &Path) -> Command {
    let mut command = Command::new(binary);
    command
        .arg("-e")
        .arg(folder.join("error.log"))
        .arg("-p")
        .arg(folder)
        .arg("-c")
        .arg(folder.join("nginx.conf"))
        .env_remove("NGINX")
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

/// Whether a worker answers.
async fn ready(addr: SocketAddr) -> bool {
    let ask = async {
        let mut stream = TcpStream::connect(addr).await?;
        stream.write_all(b"GET /ready HTTP/1.1\r\nHost: herd\r\nConnection: close\r\n\r\n").await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        std::io::Result::Ok(answer.starts_with(b"HTTP/1.1 204"))
    };
    matches!(timeout(PATIENCE, ask).await, Ok(Ok(true)))
}
