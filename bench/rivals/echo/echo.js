// Node.js' echo server: a stream for each connection. Argument: the port.
const net = require("node:net");

net
  .createServer({ noDelay: true }, (connection) => {
    connection.on("error", () => connection.destroy());
    connection.on("data", (data) => {
      if (!connection.write(data)) connection.pause();
    });
    connection.on("drain", () => connection.resume());
  })
  .listen(Number(process.argv[2]), "127.0.0.1", 4096);
