// Buys pages through the proxy with Go's default client, and prints what came back, a line of JSON each.
package main

import (
	"bufio"
	"encoding/json"
	"net/http"
	"os"
	"strings"
)

func main() {
	proxy, token, page := os.Args[1], os.Args[2], os.Args[3]
	out := json.NewEncoder(os.Stdout)
	for number := 0; number < 3; number++ {
		request, err := http.NewRequest("POST", proxy+page, strings.NewReader("what?"))
		if err != nil {
			panic(err)
		}
		request.Header.Set("X402guard-Session", token)
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			panic(err)
		}
		lines := []string{}
		for read := bufio.NewScanner(answer.Body); read.Scan(); {
			lines = append(lines, read.Text())
		}
		answer.Body.Close()
		out.Encode(map[string]interface{}{
			"status": answer.StatusCode, "type": answer.Header.Get("Content-Type"), "lines": lines,
			"receipt": answer.Header.Get("X402guard-Receipt"),
		})
	}
}
