// Go's echo server: a goroutine for each connection. Argument: the port.
package main

import (
	"log"
	"net"
	"os"
)

func echo(connection net.Conn) {
	defer connection.Close()
	// The largest message of the tables.
	buffer := make([]byte, 102400)
	for {
		n, err := connection.Read(buffer)
		if n > 0 {
			if _, err := connection.Write(buffer[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:"+os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	for {
		connection, err := listener.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go echo(connection)
	}
}
