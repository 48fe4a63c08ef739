//! Private Redis servers, alone, as a cluster, and behind sentinels, and a proxy that breaks what runs through it.
//!
//! A server has a folder of its own below `TMPDIR`, with its socket, its log and a `*.pid` file: what a killed test could
//! not stop, `tests/run` finds there. Missing programs are failures, never skipped tests.
#![allow(dead_code, unreachable_pub, reason = "every test binary includes this file and uses a part of it")]

pub mod proxy;

use rustix::process::{Pid, Signal, kill_process};
use std::{
    env, fs,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};
use tokio::time::{Instant, sleep};

/// How long starting and stopping may take before the test fails.
const PATIENCE: Duration = Duration::from_secs(20);

/// A folder that goes when this is dropped.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = env::temp_dir().join(format!("herd-redis-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Left behind if it cannot be removed; the system's temporary folder is cleared some day.
        fs::remove_dir_all(&self.0).ok();
    }
}

/// A port below those that the system gives to clients, with room for a cluster's second port. Somebody may
/// still take it before its server does, so starting is tried again.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..10_000 {
        let step = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_mul(7919);
        let port = 15_000 + (std::process::id().wrapping_mul(131).wrapping_add(step) % 7000) as u16;
        if [port, port + 10_000].iter().all(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok()) {
            return port;
        }
    }
    panic!("no free port");
}

/// Waits until it is so.
pub async fn until(what: &str, mut so: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !so().await {
        assert!(began.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// A private redis-server.
#[derive(Debug)]
pub struct Redis {
    child: Child,
    folder: Folder,
    port: u16,
    options: Vec<String>,
    password: Option<String>,
}

impl Redis {
    /// Alone, without a password, keeping nothing.
    pub async fn start() -> Self {
        Self::with(&[]).await
    }

    /// With more options, as on its command line: `&["--maxmemory", "10mb"]`. `{folder}` stands for its folder.
    pub async fn with(options: &[&str]) -> Self {
        Self::place(Folder::new(), options).await
    }

    /// In a folder in which something lies already.
    pub async fn place(folder: Folder, options: &[&str]) -> Self {
        let path = folder.path().to_str().unwrap().to_owned();
        let options: Vec<String> = options.iter().map(|option| option.replace("{folder}", &path)).collect();
        let password =
            options.iter().position(|option| option == "--requirepass").map(|at| options[at + 1].clone());
        for _ in 0..5 {
            let port = free_port();
            let mut child = spawn(&folder, port, &options);
            if answers(&folder, &mut child, password.as_deref()).await {
                return Redis { child, folder, port, options, password };
            }
            child.kill().ok();
            child.wait().ok();
        }
        panic!(
            "redis-server does not start: {}",
            fs::read_to_string(folder.path().join("log")).unwrap_or_default()
        );
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    pub fn tls_port(&self) -> Option<u16> {
        let at = self.options.iter().position(|option| option == "--tls-port")?;
        Some(self.options[at + 1].parse().unwrap())
    }

    /// The port by which other nodes of its cluster know it.
    fn bus_name(&self) -> u16 {
        self.tls_port().unwrap_or(self.port)
    }

    pub fn socket_url(&self) -> String {
        format!("unix://{}", self.folder.path().join("sock").display())
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What `redis-cli` prints, over the socket, as the default user.
    pub fn cli(&self, arguments: &[&str]) -> String {
        cli(&self.folder, self.password.as_deref(), arguments)
    }

    /// One field of `INFO`.
    pub fn info(&self, field: &str) -> String {
        let info = self.cli(&["INFO", "everything"]);
        let line = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("no {field} in {info}")).trim().to_owned()
    }

    /// How often a command ran.
    pub fn calls(&self, command: &str) -> u64 {
        let info = self.cli(&["INFO", "commandstats"]);
        let start = format!("cmdstat_{command}:calls=");
        let calls = info.lines().find_map(|line| line.strip_prefix(start.as_str()));
        calls.map_or(0, |calls| calls.split(',').next().unwrap().parse().unwrap())
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(pid(&self.child), signal).unwrap();
    }

    /// SIGSTOP: its sockets stay open, nothing is answered.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT.
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts again on the same port after [`kill`](Self::kill): empty, unless it was told to save.
    pub async fn start_again(&mut self) {
        for _ in 0..5 {
            self.child = spawn(&self.folder, self.port, &self.options);
            if answers(&self.folder, &mut self.child, self.password.as_deref()).await {
                return;
            }
            self.child.kill().ok();
            self.child.wait().ok();
        }
        panic!("redis-server does not start again");
    }

    pub async fn restart(&mut self) {
        self.kill();
        self.start_again().await;
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        // SIGKILL ends a stopped process too.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

pub fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id().try_into().unwrap()).unwrap()
}

fn spawn(folder: &Folder, port: u16, options: &[String]) -> Child {
    let path = folder.path();
    fs::remove_file(path.join("sock")).ok();
    let log = fs::File::options().create(true).append(true).open(path.join("log")).unwrap();
    let mut command = Command::new("redis-server");
    command.current_dir(path).args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--daemonize", "no"]);
    command
        .arg("--unixsocket")
        .arg(path.join("sock"))
        .arg("--pidfile")
        .arg(path.join("redis.pid"))
        .arg("--dir")
        .arg(path);
    if !options.iter().any(|option| option == "--save") {
        command.args(["--save", ""]);
    }
    command.args(options);
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    command.spawn().unwrap_or_else(|error| panic!("redis-server (Debian: redis-server): {error}"))
}

async fn answers(folder: &Folder, child: &mut Child, password: Option<&str>) -> bool {
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        if folder.path().join("sock").exists() {
            let answer = cli(folder, password, &["PING"]);
            if answer.contains("PONG") || answer.contains("LOADING") {
                return true;
            }
        }
        sleep(Duration::from_millis(10)).await;
    }
    false
}

fn cli(folder: &Folder, password: Option<&str>, arguments: &[&str]) -> String {
    let mut command = Command::new("redis-cli");
    command.arg("-s").arg(folder.path().join("sock")).args(arguments).stdin(Stdio::null());
    if let Some(password) = password {
        command.env("REDISCLI_AUTH", password);
    }
    let output = command.output().unwrap_or_else(|error| panic!("redis-cli (Debian: redis-tools): {error}"));
    String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
}

/// Three primaries, each with a third of the slots.
#[derive(Debug)]
pub struct Cluster {
    pub nodes: Vec<Redis>,
}

const SLOTS: u16 = 16_384;

impl Cluster {
    pub async fn start() -> Self {
        Self::with(&[], false).await
    }

    /// With more options for each node. With `tls`, nodes know each other by a TLS port of their own, and these
    /// options name the certificates.
    pub async fn with(options: &[&str], tls: bool) -> Self {
        let mut nodes = Vec::new();
        for _ in 0..3 {
            nodes.push({
                let port = free_port().to_string();
                let mut all = vec![
                    "--cluster-enabled",
                    "yes",
                    "--cluster-node-timeout",
                    "1000",
                    "--cluster-require-full-coverage",
                    "no",
                ];
                all.extend_from_slice(options);
                if tls {
                    all.extend(["--tls-port", &port, "--tls-cluster", "yes"]);
                }
                Redis::with(&all).await
            });
        }
        let cluster = Cluster { nodes };
        for (place, node) in (0_u16..).zip(&cluster.nodes) {
            let slots: Vec<String> = (0..SLOTS)
                .filter(|slot| slot * 3 / SLOTS.min(16_383) == place || (*slot == SLOTS - 1 && place == 2))
                .map(|slot| slot.to_string())
                .collect();
            let mut command = vec!["CLUSTER", "ADDSLOTS"];
            command.extend(slots.iter().map(String::as_str));
            assert_eq!(node.cli(&command), "OK");
            if place > 0 {
                node.cli(&["CLUSTER", "MEET", "127.0.0.1", &cluster.nodes[0].bus_name().to_string()]);
            }
        }
        until("the cluster is up", async || {
            cluster.nodes.iter().all(|node| {
                let info = node.cli(&["CLUSTER", "INFO"]);
                ["cluster_state:ok", "cluster_known_nodes:3", "cluster_slots_assigned:16384"]
                    .iter()
                    .all(|line| info.contains(line))
            })
        })
        .await;
        cluster
    }

    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Redis::url).collect()
    }

    pub fn slot(&self, key: &str) -> u16 {
        self.nodes[0].cli(&["CLUSTER", "KEYSLOT", key]).parse().unwrap()
    }

    /// The place of the node that has a slot, by its own word.
    pub fn owner(&self, slot: u16) -> usize {
        let owns = |node: &Redis| {
            let nodes = node.cli(&["CLUSTER", "NODES"]);
            let own = nodes.lines().find(|line| line.contains("myself")).unwrap_or_default().to_owned();
            own.split_whitespace().skip(8).any(|range| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                matches!((first.parse::<u16>(), last.parse::<u16>()), (Ok(first), Ok(last)) if first <= slot && slot <= last)
            })
        };
        self.nodes.iter().position(owns).unwrap()
    }

    pub fn id(&self, node: usize) -> String {
        self.nodes[node].cli(&["CLUSTER", "MYID"])
    }

    /// Begins to move a slot: keys that are not at `from` any more are looked for at `to`.
    pub fn begin_move(&self, slot: u16, from: usize, to: usize) {
        let slot = slot.to_string();
        assert_eq!(self.nodes[to].cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &self.id(from)]), "OK");
        assert_eq!(self.nodes[from].cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &self.id(to)]), "OK");
    }

    pub fn move_key(&self, key: &str, from: usize, to: usize) {
        let port = self.nodes[to].port.to_string();
        assert_eq!(self.nodes[from].cli(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]), "OK");
    }

    pub fn end_move(&self, slot: u16, from: usize, to: usize) {
        let (slot, id) = (slot.to_string(), self.id(to));
        for node in [to, from] {
            assert_eq!(self.nodes[node].cli(&["CLUSTER", "SETSLOT", &slot, "NODE", &id]), "OK");
        }
    }
}

/// A primary, a replica, and sentinels that watch them as `herd`.
#[derive(Debug)]
pub struct Sentinels {
    pub servers: Vec<Redis>,
    pub sentinels: Vec<Redis>,
}

impl Sentinels {
    pub async fn start(sentinels: usize) -> Self {
        Self::with(sentinels, None).await
    }

    /// With a password for the servers, and one for the sentinels.
    pub async fn with(sentinels: usize, passwords: Option<(&str, &str)>) -> Self {
        let mut options = vec!["--repl-diskless-sync-delay", "0"];
        if let Some((servers, _)) = passwords {
            options.extend(["--requirepass", servers, "--masterauth", servers]);
        }
        let primary = Redis::with(&options).await;
        let port = primary.port.to_string();
        options.extend(["--replicaof", "127.0.0.1", &port]);
        let replica = Redis::with(&options).await;
        until("the replica follows", async || replica.info("master_link_status") == "up").await;
        let mut fleet = Sentinels { servers: vec![primary, replica], sentinels: Vec::new() };
        for _ in 0..sentinels {
            let folder = Folder::new();
            let config = folder.path().join("sentinel.conf");
            let quorum = sentinels / 2 + 1;
            let mut text = format!(
                "sentinel monitor herd 127.0.0.1 {port} {quorum}\nsentinel down-after-milliseconds herd 500\n\
                 sentinel failover-timeout herd 3000\n"
            );
            if let Some((servers, own)) = passwords {
                text += &format!(
                    "sentinel auth-pass herd {servers}\nrequirepass {own}\nsentinel sentinel-pass {own}\n"
                );
            }
            fs::write(&config, text).unwrap();
            fleet.sentinels.push(Redis::sentinel(folder, passwords.map(|(_, own)| own.to_owned())).await);
        }
        until("the sentinels know the replica and each other", async || {
            fleet.sentinels.iter().all(|sentinel| {
                let master = sentinel.cli(&["SENTINEL", "MASTER", "herd"]);
                let field = |name: &str| {
                    let mut lines = master.lines();
                    lines.find(|line| *line == name).and_then(|_| lines.next()).unwrap_or_default().to_owned()
                };
                field("num-slaves") == "1" && field("num-other-sentinels") == (sentinels - 1).to_string()
            })
        })
        .await;
        fleet
    }

    pub fn urls(&self) -> Vec<String> {
        self.sentinels.iter().map(Redis::url).collect()
    }

    /// The port of the primary, as a sentinel says.
    pub fn primary(&self) -> u16 {
        let address = self.sentinels[0].cli(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "herd"]);
        address.lines().nth(1).unwrap().trim().parse().unwrap()
    }
}

impl Redis {
    async fn sentinel(folder: Folder, password: Option<String>) -> Self {
        for _ in 0..5 {
            let port = free_port();
            let path = folder.path();
            let log = fs::File::options().create(true).append(true).open(path.join("log")).unwrap();
            let mut command = Command::new("redis-server");
            command.current_dir(path).arg(path.join("sentinel.conf")).arg("--sentinel");
            command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--daemonize", "no"]);
            command.arg("--unixsocket").arg(path.join("sock")).arg("--pidfile").arg(path.join("redis.pid"));
            command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
            let mut child = command
                .spawn()
                .unwrap_or_else(|error| panic!("redis-server (Debian: redis-server): {error}"));
            if answers(&folder, &mut child, password.as_deref()).await {
                return Redis { child, folder, port, options: Vec::new(), password };
            }
            child.kill().ok();
            child.wait().ok();
        }
        panic!(
            "the sentinel does not start: {}",
            fs::read_to_string(folder.path().join("log")).unwrap_or_default()
        );
    }
}

/// A certificate authority, a server's certificate for `localhost` and 127.0.0.1, and a client's, made by openssl.
pub fn certificates(folder: &Path) {
    let openssl = |arguments: &[&str]| {
        let mut command = Command::new("openssl");
        command.current_dir(folder).args(arguments).stdin(Stdio::null());
        let output = command.output().unwrap_or_else(|error| panic!("openssl (Debian: openssl): {error}"));
        assert!(
            output.status.success(),
            "openssl {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    let with = |begin: &[&'static str], end: &[&'static str]| [begin, &key, end].concat();
    openssl(&with(
        &["req", "-x509"],
        &[
            "-days",
            "2",
            "-keyout",
            "ca.key",
            "-out",
            "ca.pem",
            "-subj",
            "/CN=herd test authority",
            "-addext",
            "basicConstraints=critical,CA:TRUE",
        ],
    ));
    fs::write(folder.join("server.ext"), "subjectAltName=DNS:localhost,IP:127.0.0.1\n").unwrap();
    fs::write(folder.join("client.ext"), "extendedKeyUsage=clientAuth\n").unwrap();
    for (name, subject) in [("server", "/CN=localhost"), ("client", "/CN=client")] {
        let (key_file, request) = (format!("{name}.key"), format!("{name}.csr"));
        let mut arguments = with(&["req"], &["-subj", subject]);
        arguments.extend(["-keyout", &key_file, "-out", &request]);
        openssl(&arguments);
        openssl(&[
            "x509",
            "-req",
            "-days",
            "2",
            "-in",
            &request,
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-out",
            &format!("{name}.pem"),
            "-extfile",
            &format!("{name}.ext"),
        ]);
    }
}
